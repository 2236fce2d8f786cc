"""ALFWorld's command grammar, as plain data: templates, and the names that real games use."""

from __future__ import annotations

import itertools

from covsero_jax.envs import alfworld_rooms

TEMPLATES = (
    'look', 'inventory', 'help', 'go to {r}', 'open {r}', 'close {r}', 'examine {r}', 'examine {o}', 'use {o}',
    'take {o} from {r}', 'move {o} to {r}', 'put {o} in/on {r}', 'clean {o} with {r}', 'heat {o} with {r}',
    'cool {o} with {r}', 'slice {o} with {o}',
)  # `put` is that of the older data (json_2.1.1)
RECEPTACLES = tuple(sorted({kind.lower() for kind in itertools.chain(
    alfworld_rooms.FITS, *(room.receptacles for room in alfworld_rooms.ROOMS.values()))}))
OBJECTS = tuple(sorted({kind.lower() for kind in itertools.chain(
    alfworld_rooms.EXTRAS, *alfworld_rooms.FITS.values())}))


def every_template_and_name() -> list[str]:
    """Commands in which every template and every name occurs. All numbers are digits, which Qwen2.5 splits."""
    return [
        template.format(o=f'{obj} 10', r=f'{receptacle} 2')
        for template in TEMPLATES
        for obj, receptacle in itertools.zip_longest(OBJECTS, RECEPTACLES, fillvalue='desk')
    ]
