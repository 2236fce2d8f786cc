"""A Sokoban position as a picture for people: the visual variant. Agents see the text."""

from __future__ import annotations

import io

from PIL import Image, ImageDraw

_FLOOR, _WALL, _MORTAR = (243, 236, 219), (112, 96, 84), (148, 131, 116)
_TARGET, _BOX, _EDGE, _DONE = (214, 92, 72), (201, 148, 84), (120, 80, 40), (92, 158, 96)
_PLAYER = (58, 104, 170)


def from_text(grid: str, cell: int = 32) -> bytes:
    """The PNG of a grid as the environment shows it; `cell` pixels per cell. Raises ValueError for other texts."""
    rows = [line.split(' ') for line in grid.splitlines()]
    if not rows or len({len(row) for row in rows}) != 1 or not {symbol for row in rows for symbol in row} <= set('#_O√XPS'):
        raise ValueError(f'not a grid of the cells # _ O √ X P S: {grid[:60]!r}')
    image = Image.new('RGB', (cell * len(rows[0]), cell * len(rows)), _FLOOR)
    draw = ImageDraw.Draw(image)
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            _cell(draw, symbol, x * cell, y * cell, cell)
    png = io.BytesIO()
    image.save(png, 'PNG', optimize=True)
    return png.getvalue()


def _cell(draw: ImageDraw.ImageDraw, symbol: str, x: int, y: int, size: int) -> None:
    def square(share: float) -> tuple[float, float, float, float]:
        margin = size * (1 - share) / 2
        return (x + margin, y + margin, x + size - 1 - margin, y + size - 1 - margin)

    if symbol == '#':
        draw.rectangle(square(1), fill=_WALL)
        for row in range(2):
            draw.line((x, y + row * size // 2, x + size, y + row * size // 2), fill=_MORTAR)
            middle = x + size // 2 if row else x
            draw.line((middle, y + row * size // 2, middle, y + (row + 1) * size // 2), fill=_MORTAR)
    if symbol in 'OS√':
        draw.ellipse(square(0.4), outline=_TARGET, width=max(1, size // 12))
    if symbol in 'X√':
        draw.rectangle(square(0.8), fill=_DONE if symbol == '√' else _BOX, outline=_EDGE, width=max(1, size // 16))
        left, top, right, bottom = square(0.8)
        draw.line((left, top, right, bottom), fill=_EDGE)
        draw.line((left, bottom, right, top), fill=_EDGE)
    if symbol in 'PS':
        draw.ellipse(square(0.66 if symbol == 'P' else 0.56), fill=_PLAYER)
        draw.ellipse((x + size * 0.38, y + size * 0.38, x + size * 0.46, y + size * 0.46), fill=_FLOOR)
        draw.ellipse((x + size * 0.54, y + size * 0.38, x + size * 0.62, y + size * 0.46), fill=_FLOOR)
