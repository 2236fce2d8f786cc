"""What `experiments.plan` prints, from its records: programs of one slice, the verdict, and a table of several slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.plan_programs import PROGRAMS

Record = dict[str, Any]
_SHORT = {'all-gather': 'ag', 'reduce-scatter': 'rs', 'all-reduce': 'ar', 'all-to-all': 'a2a', 'collective-permute': 'cp'}
_HEADER = ('program', 'chips', 'arguments', 'outputs', 'temporaries', 'peak', 'held', 'of GiB', 'TFLOP', 'GB', 'bound ms',
           'collectives', 'compile s')


def needed_gib(program: Record) -> float:
    """GiB of a chip while this program runs: its own, and what is held meanwhile. A lower bound where it did not compile."""
    own = program['gib']['peak'] if 'gib' in program else program['needs_gib']
    return own + program['held_gib']


def usable_gib(record: Record) -> float | None:
    return next((p['usable_gib'] for p in record['programs'].values() if 'usable_gib' in p), record['usable_gib'])


def worst(record: Record) -> tuple[str, Record]:
    """The program that needs most memory."""
    return max(record['programs'].items(), key=lambda item: needed_gib(item[1]))


def fits(record: Record) -> bool | None:
    """Whether every program fits; None where the chip's memory is not known."""
    usable = usable_gib(record)
    return None if usable is None else needed_gib(worst(record)[1]) <= usable


def detail(record: Record) -> str:
    """One row per program (GiB, TFLOP and GB of one chip), the largest arrays, the verdict."""
    rows = [_HEADER]
    for name, program in record['programs'].items():
        rows += _rows(name, program, record)
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = ['  '.join(cell.ljust(width) if i in (0, 11) else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths, strict=True))) for row in rows]
    kinds = ', '.join(f'{short} {kind}' for kind, short in _SHORT.items())
    lines.append(f'(per chip; {kinds}; inside a loop counted once)')
    lines += [line for name, program in record['programs'].items() for line in _arrays(name, program, record)]
    return '\n'.join([*lines, *_verdict(record)])


def _rows(name: str, program: Record, record: Record) -> list[tuple[str, ...]]:
    gib, usable = program.get('gib'), usable_gib(record)
    sizes = [f'{gib[kind]:.2f}' for kind in ('arguments', 'outputs', 'temporaries', 'peak')] if gib else \
        ['', '', '', f'>={program["needs_gib"]:.2f}']
    count = program.get('collectives', {})
    kinds = ' '.join(f'{count[kind]} {short}' for kind, short in _SHORT.items() if count.get(kind)) or '-'
    first = (str(record['chips']), *sizes, f'{program["held_gib"]:.2f}', f'{usable:.2f}' if usable else '-')
    last = (kinds if gib else 'did not compile', f'{program["compile_s"]:.0f}')
    rows = []
    for part, cost in program['parts'].items():
        bound = '-' if cost['roofline_s'] is None else f'{cost["roofline_s"] * 1e3:,.1f}'
        figures = (f'{cost["flops"] / 1e12:,.2f}', f'{cost["bytes"] / 1e9:,.2f}', bound)
        label = name if len(program['parts']) == 1 else f'{name}: {part}'
        rows.append((label, *(first if not rows else [''] * len(first)), *figures, *(last if not rows else ('', ''))))
    return rows


def _arrays(name: str, program: Record, record: Record) -> list[str]:
    """The largest array of a program, and of those with the vocabulary, beside logits of all tokens in bfloat16."""
    if not program.get('largest') or name == 'apply':
        return []
    shapes = record['request']['shapes']
    training, sampling = shapes['micro_batch'] * shapes['length'], shapes['rows'] * (shapes['prompt'] + shapes['action'])
    whole = 2 * (sampling if name == 'sample' else training) * record['request']['model']['vocab_size']
    lines = [f'{name}: largest array {_array(program["largest"])}']
    if array := program.get('largest_with_vocabulary'):
        share, own = array['nbytes'] / whole, array['nbytes'] * record['row_shards'] / whole
        lines.append(f'{name}: largest logits {_array(array)} = {share:.1%} of rows x tokens x vocabulary x 2 bytes '
                     f'({own:.1%} of this for the rows of one chip)')
    return lines


def _array(array: Record) -> str:
    return f'{array["shape"]}, {array["nbytes"] / 2**30:.2f} GiB, made by {array["made_by"]}'


def _verdict(record: Record) -> list[str]:
    usable, chips = usable_gib(record), record['chips']
    if usable is None:
        return ['A CPU has no limit of its own to compare with.']
    lines = []
    for name, program in record['programs'].items():
        excess = needed_gib(program) - usable
        if excess > 0:
            at_least, turn = '' if 'gib' in program else 'at least ', '; '.join(advice(name, program, record))
            lines.append(f'{name} does NOT fit: {at_least}{excess:.2f} GiB per chip too much. Turn: {turn}')
    name, program = worst(record)
    return lines or [f'fits: {needed_gib(program):.2f} of {usable:.2f} GiB on each of {chips} chips ({name} needs most)']


def advice(name: str, program: Record, record: Record) -> list[str]:
    """Which fields to change when a program is too large, the most effective first."""
    shapes, shards = record['request']['shapes'], record['row_shards']
    gib, usable = program.get('gib'), usable_gib(record)
    fixed = program['held_gib'] + (gib['arguments'] if gib else 0.0)
    state = ['more chips in mesh.fsdp (parameters, moments and gradients are cut by it)']
    if record['request']['loss']['kl_coef']:
        state.append('loss.kl_coef=0 (no reference policy is held)')
    if record['request']['moment_bytes'] >= 8:
        state.append('optimizer.first_moment=bfloat16, or optimizer.name=adafactor')
    if not record['request']['model']['lora_rank']:
        state.append('lora.rank=32 (only adapters have gradients and moments)')
    if name == 'apply':
        return state
    if name == 'sample':
        work = [f'smaller rollout.row_buckets (largest now {shapes["rows"]} rows)']
        if record['request']['gather_weights']:
            work.insert(0, 'rollout.gather_weights=False (no whole copy for the sampler), or mesh.tensor, which cuts it')
    else:
        work = [f'learner.micro_batch={shapes["micro_batch"] // 2}'] if shapes['micro_batch'] >= 2 * shards else []
    if name == 'train' and record['request']['model']['remat'] != 'full':
        work.insert(0, 'model.remat=full')
    shortest = shapes['prompt'] + shapes['action']
    if name != 'sample' and shapes['window'] == 0 and shapes['length'] > shortest:
        work.append(f'learner.pack_length={max(shapes["length"] // 2, shortest)}')
    work.append(f'shorter prompt.buckets (longest now {shapes["prompt"]}) or prompt.max_action ({shapes["action"]})')
    logits = program.get('largest_with_vocabulary')
    if name != 'sample' and logits and logits == program['largest'] and shapes['chunk'] > 1:
        work.insert(0, f'loss.chunk={shapes["chunk"] // 2}')
    return [*state, *work] if fixed > usable / 2 else [*work, *state]


def overview(records: Mapping[tuple[str, str], Record]) -> str:
    """A Markdown table: a row per topology, a column per preset, GiB of a chip in the program that needs most."""
    presets = list(dict.fromkeys(preset for preset, _ in records))
    lines = ['| slice | chips | GiB a chip | ' + ' | '.join(presets) + ' |', '|' + '---|' * (3 + len(presets))]
    for name in dict.fromkeys(name for _, name in records):
        made = {preset: records[preset, name] for preset in presets if records.get((preset, name), {}).get('programs')}
        if made:
            some = next(iter(made.values()))
            size = '–' if usable_gib(some) is None else f'{usable_gib(some):.2f}'
            cells = ' | '.join(_cell(made[preset]) if preset in made else '–' for preset in presets)
            lines.append(f'| `{name}` | {some["chips"]} | {size} | {cells} |')
    return '\n'.join(lines)


def _cell(record: Record) -> str:
    name, program = worst(record)
    missing = [program for program in PROGRAMS if program not in record['programs']]
    verdict = {True: 'fits', False: '**no**', None: ''}[fits(record)]
    learning = [other for other in record['programs'].items() if other[0] != 'sample']
    rest = ''
    if name == 'sample' and learning:
        other, needs = max(learning, key=lambda item: needed_gib(item[1]))
        rest = f'; {other} {_needs(needs)}'
    return f'{_needs(program)} ({name}{rest}): {verdict}' + (f', without {", ".join(missing)}' if missing else '')


def _needs(program: Record) -> str:
    return f'{"" if "gib" in program else "≥ "}{needed_gib(program):.1f}'
