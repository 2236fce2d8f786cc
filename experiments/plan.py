"""Will it fit? Compiles the programs of a run for a TPU slice, without the slice and without weights, and says so.

    python -m experiments.plan --config=configs/alfworld_covgpo.py:7b --topology=v5e:4x4
    python -m experiments.plan --presets=1.5b,7b --topology=v5e:2x4,v5e:4x4,v5p:2x2x1,v6e:2x4      a table of all
    ... --only_show                     the table of what was compiled before, nothing is compiled

A topology can have fields of its own, as in v5e:4x4+learner.micro_batch=16 or v5e:2x4+mesh.fsdp=4+mesh.tensor=2.

Needs the TPU's compiler, pip install "jax[tpu]"; it runs on CPUs, for a minute a program. Flags that are not listed are
fields of the configuration (--config.learner.micro_batch=16). Programs, each at the largest shapes of the run:

    train     gradient of a micro-batch, added up                    logprobs  old and reference log-probabilities
    apply     clipped AdamW                                          sample    prefill and the whole decode loop

Memory and collectives are the compiler's. `held` is what lies on the chip meanwhile, untouched. FLOPs and bytes are
counted from shapes (experiments.plan_costs), because the compiler counts loops once; the time is the larger of
FLOPs / peak and bytes / bandwidth, with rows spread evenly and communication free: a bound, no forecast. `sample` is
one compiled program with two costs, prefill and one decode step.

Finished programs are kept in results/plan/, one file per preset and topology; the same command continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from covsero_jax import metrics, sharding
from experiments import plan_costs, plan_hlo, plan_programs, plan_tables, results, topologies, wiring

Record = dict[str, Any]


def request(config: ConfigDict, topology: str) -> Record:
    """Everything that the programs depend on, as JSON."""
    mesh = {name: value for name, value in config.mesh.items() if name != 'min_memory_gib'}
    wanted = {'topology': topology, 'mesh': mesh, 'temperature': config.rollout.temperature,
              'model': dataclasses.asdict(plan_programs.model_config(config)),
              'shapes': dataclasses.asdict(plan_programs.shapes_of(config)),
              'loss': dataclasses.asdict(wiring.loss_config(config)), 'bands': config.rollout.band_mix,
              'moment_bytes': plan_programs.moment_bytes(config), 'pack_rows': config.learner.pack_rows,
              'gather_weights': config.rollout.gather_weights}
    return json.loads(json.dumps(wanted))


def compile_program(lower: Callable[[], jax.stages.Lowered], vocabulary: tuple[set[int], set[int]]) -> Record:
    """Lower and compile one program; GiB on one device. A program that is too large for the device is a record, too."""
    start = time.monotonic()
    try:
        compiled = lower().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = plan_hlo.out_of_memory(str(error))
        if needed is None:
            raise
        return {'compile_s': round(time.monotonic() - start, 1), 'needs_gib': needed[0], 'usable_gib': needed[1]}
    seconds, memory, text = time.monotonic() - start, compiled.memory_analysis(), compiled.as_text()
    sizes = {'arguments': memory.argument_size_in_bytes, 'outputs': memory.output_size_in_bytes,
             'aliased': memory.alias_size_in_bytes, 'temporaries': memory.temp_size_in_bytes,
             'code': memory.generated_code_size_in_bytes}
    sizes['peak'] = sum(sizes.values()) - 2 * sizes['aliased']
    arrays = plan_hlo.temporaries(text)
    logits = plan_hlo.logits(arrays, *vocabulary)
    return {'compile_s': round(seconds, 1), 'gib': {name: round(size / 2**30, 4) for name, size in sizes.items()},
            'collectives': plan_hlo.collectives(text),
            'largest': dataclasses.asdict(arrays[0]) if arrays else None,
            'largest_with_vocabulary': dataclasses.asdict(logits) if logits else None}


def costs(config: ConfigDict, program: str) -> dict[str, plan_costs.Cost]:
    """Part of a program -> what it takes. `sample` is one program with two: its prefill, and one step of its decode loop."""
    c, s = plan_programs.model_config(config), plan_programs.shapes_of(config)
    if program == 'apply':
        return {program: plan_costs.apply(c, plan_programs.moment_bytes(config))}
    if program == 'sample':
        return {'prefill': plan_costs.prefill(c, s.rows, s.prompt, s.action),
                'decode step': plan_costs.decode(c, s.rows, s.prompt, s.action)}
    count = {'train': plan_costs.train, 'logprobs': plan_costs.logprobs}[program]
    return {program: count(c, s.micro_batch, s.length, s.window, s.scored)}


def bounds(config: ConfigDict, program: str, mesh: jax.sharding.Mesh, chip: topologies.Chip | None) -> Record:
    """Part of the program -> FLOPs, bytes and the bound on its time, for one chip."""
    tensor, out = mesh.size // sharding.num_row_shards(mesh), {}
    for name, cost in costs(config, program).items():
        flops, nbytes = cost.per_chip(mesh.size, tensor)
        seconds = None if chip is None else max(flops / chip.flops, nbytes / chip.bandwidth)
        out[name] = {'flops': flops, 'bytes': nbytes, 'roofline_s': seconds}
    return out


def load(path: pathlib.Path, wanted: Record) -> Record:
    """The file of one preset and topology, or an empty one. ConfigError when it was made with other settings."""
    if not path.exists():
        return {'request': wanted, 'programs': {}}
    record = json.loads(path.read_text())
    changed = [line for name in record['request'] for line in wiring.differences(
        {name: record['request'][name]}, {name: _as_old_as(record['request'][name], wanted.get(name))})]
    if changed:
        raise wiring.ConfigError(f'{path} was made with other settings ({", ".join(changed)}); remove it, or choose another '
                                 '--out')
    return record


def _as_old_as(old: Any, new: Any) -> Any:
    """`new` without the fields that did not exist yet when `old` was written."""
    return {name: new[name] for name in old if name in new} if isinstance(old, dict) and isinstance(new, dict) else new


def checked_mesh(config: ConfigDict, topology: str) -> jax.sharding.Mesh:
    """The run's mesh on devices of the topology. Raises ConfigError for what cannot work."""
    mesh = wiring.make_mesh(config, topologies.devices(topology))
    plan_programs.check(config, mesh)
    return mesh


def plan(config: ConfigDict, mesh: jax.sharding.Mesh, record: Record, programs: Sequence[str], path: pathlib.Path) -> None:
    """Compile programs, one at a time, into `record`, and write it after each."""
    topology, sizes = record['request']['topology'], record['request']['model']
    chip, chips = topologies.check(topology)
    held = plan_programs.held_bytes(config, mesh)
    vocabulary = _dimensions(mesh, sizes['vocab_size']), _dimensions(mesh, sizes['embed_dim'])
    lower = plan_programs.lowerings(config, mesh)
    record |= {'chips': chips, 'devices': dict(mesh.shape), 'row_shards': sharding.num_row_shards(mesh),
               'commit': results.commit(), 'date': time.strftime('%Y-%m-%d'), 'jax': jax.__version__,
               'compiler': f'libtpu {topologies.libtpu_version()}' if chip else 'XLA for CPU',
               'usable_gib': chip and chip.usable_gib, 'hbm_gib': chip and chip.hbm_gib}
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in programs:
        print(f'{topology}: compiling {name} ...', flush=True)
        made = compile_program(lower[name], vocabulary)
        made |= {'held_gib': round(held[name] / 2**30, 4), 'parts': bounds(config, name, mesh, chip)}
        record['programs'][name] = made
        metrics.replace_file(path, json.dumps(record, indent=1) + '\n')
        jax.clear_caches()


def _dimensions(mesh: jax.sharding.Mesh, size: int) -> set[int]:
    """The whole dimension, and what is left of it where a mesh axis cuts it."""
    return {size} | {size // part for part in [*mesh.shape.values(), mesh.size] if part > 1 and size % part == 0}


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument('--config', default='configs/alfworld_covgpo.py:1.5b', help='experiment, optionally with :preset')
    parser.add_argument('--presets', help='several presets of that experiment, separated by commas')
    parser.add_argument('--topology', default='v5e:2x4', help='one or several, separated by commas; see above')
    parser.add_argument('--programs', default=','.join(plan_programs.PROGRAMS), help='which, in which order')
    parser.add_argument('--out', default='results/plan', help='folder of the finished programs')
    parser.add_argument('--only_show', action='store_true', help='compile nothing')
    options, rest = parser.parse_known_args(argv)
    stray = [argument for argument in rest if not argument.startswith('--config.')]
    if stray:
        parser.error(f'unexpected arguments {stray}')
    unknown = set(options.programs.split(',')) - set(plan_programs.PROGRAMS)
    if unknown:
        parser.error(f'--programs: {", ".join(sorted(unknown))}; there are {", ".join(plan_programs.PROGRAMS)}')
    return options, rest


def main(argv: Sequence[str] | None = None) -> None:
    options, overrides = parse(argv)
    file, _, preset = options.config.partition(':')
    presets, slices = (options.presets or preset or 'tiny').split(','), split(options.topology)
    programs = () if options.only_show else options.programs.split(',')
    changes = ''.join(f'+{override.removeprefix("--config.")}' for override in overrides)
    todo, records = [], {}
    for preset in presets:  # everything that cannot work is said before anything is compiled
        for part in slices:
            config, topology = build(f'{file}:{preset}', overrides, part)
            name = f'{config.experiment}-{preset}{changes}-{part}.json'.replace(':', '-').replace('/', '_')
            path = pathlib.Path(options.out) / name
            record = records[preset, part] = load(path, request(config, topology))
            lacking = [program for program in programs if program not in record['programs']]
            mesh = checked_mesh(config, topology) if lacking else None
            todo.append((f'{config.experiment}, preset {preset}{changes}, {part}', config, mesh, record, lacking, path))
    for title, config, mesh, record, lacking, path in todo:
        if lacking:
            plan(config, mesh, record, lacking, path)
        if record['programs']:
            print(f'\n{title} ({path})\n{plan_tables.detail(record)}\n', flush=True)
    if len(records) > 1:
        print(plan_tables.overview(records))


def split(slices: str) -> list[str]:
    """The parts of `a,b+field=(1,2)` between commas that stand outside parentheses."""
    return re.split(r',(?![^(]*\))', slices)


def build(file: str, overrides: Sequence[str], part: str) -> tuple[ConfigDict, str]:
    """(configuration, topology) of one slice with its own fields. Raises ConfigError for what does not exist."""
    topology, *fields = part.split('+')
    topologies.check(topology)
    config = wiring.read_config([f'--config={file}', *overrides, *(f'--config.{field}' for field in fields)])
    plan_programs.model_config(config)
    return config, topology


if __name__ == '__main__':
    with wiring.one_line_errors():
        main()
