"""Planning for a slice: costs as the compiler counts them, sizes, errors before compiling, records that continue, tables."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from configs import base
from covsero_jax import model, sharding
from experiments import plan, plan_costs, plan_hlo, plan_programs, plan_tables, topologies, wiring

ROOT = pathlib.Path(__file__).parent.parent
SMALL = model.QwenConfig(vocab_size=2048, embed_dim=256, mlp_dim=768, num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32,
                         tie_embeddings=False)  # not scanned, and large enough that matrix products are the work
SHAPES = {'micro_batch': 4, 'rows': 4, 'prompt': 96, 'action': 32}


def small_config(folder: pathlib.Path, **overrides):
    """A configuration of one device whose model is SMALL: a folder with sizes and no weights."""
    (folder / 'config.json').write_text(json.dumps(SMALL.to_hf()))
    config = base.get_config('smoke')
    config.experiment, config.model.path, config.mesh.fsdp = 'small', str(folder), 1
    config.prompt.buckets, config.prompt.max_action, config.loss.chunk = (SHAPES['prompt'],), SHAPES['action'], SHAPES['action']
    config.learner.micro_batch, config.rollout.row_buckets = SHAPES['micro_batch'], (SHAPES['rows'],)
    config.update_from_flattened_dict(overrides)
    return config


@pytest.mark.parametrize(('program', 'fields'), [
    ('train', {}), ('train', {'model.remat': 'full', 'model.attention_chunk': 32}), ('logprobs', {'learner.pack_length': 128}),
    ('train', {'lora.rank': 2}), ('sample', {})], ids=str)  # fmt: skip
def test_flops_are_those_that_the_compiler_counts(program, fields, tmp_path):
    config = small_config(tmp_path, **fields)
    compiled = plan_programs.lowerings(config, wiring.make_mesh(config))[program]().compile().cost_analysis()
    flops, nbytes = sum(plan.costs(config, program).values(), plan_costs.NOTHING).per_chip(1)
    assert flops == pytest.approx(compiled['flops'], rel=0.1)
    assert 0.2 * compiled['bytes accessed'] < nbytes < compiled['bytes accessed']  # a lower bound


def test_a_decode_step_reads_all_weights_and_the_whole_cache():
    def step(params, token, position, mask, cache):
        hidden, cache = model.Qwen(SMALL).apply({'params': params}, token, position, mask, cache, 5)
        return model.project(params, hidden[:, 0], SMALL), cache

    params = jax.eval_shape(functools.partial(model.init_params, SMALL), jax.random.key(0))
    cache = jax.eval_shape(lambda: model.init_cache(SMALL, 4, 128))
    token, mask = jax.ShapeDtypeStruct((4, 1), jnp.int32), jax.ShapeDtypeStruct((4, 1, 128), bool)
    compiled = jax.jit(step, donate_argnums=4).lower(params, token, token, mask, cache).compile().cost_analysis()
    flops, nbytes = plan_costs.decode(SMALL, rows=4, prompt=96, action=32).per_chip(1)
    assert flops == pytest.approx(compiled['flops'], rel=0.1)
    assert 0.3 * compiled['bytes accessed'] < nbytes < compiled['bytes accessed']
    assert nbytes > 4 * (plan_costs.num_params(SMALL) - SMALL.vocab_size * SMALL.embed_dim)


def test_costs_grow_as_the_work_does():
    def cost(rows: int, **changes) -> plan_costs.Cost:
        return plan_costs.train(dataclasses.replace(SMALL, num_layers=12, **changes), rows, 128, 95, 32)

    assert cost(8).flops == pytest.approx(2 * cost(4).flops)
    assert cost(8).weight_bytes == cost(4).weight_bytes
    assert 1.2 < cost(8, remat='full').flops / cost(8).flops < 4 / 3
    assert cost(8, lora_rank=4).flops < cost(8).flops
    assert cost(8).per_chip(4)[0] == cost(8).flops / 4
    assert cost(8).per_chip(4, tensor=2)[1] == pytest.approx(cost(8).per_chip(4)[1] - cost(8).weight_bytes / 2)


@pytest.mark.parametrize(('name', 'billions'), [
    ('Qwen2.5-0.5B', 0.494), ('Qwen2.5-1.5B-Instruct', 1.544), ('Qwen2.5-3B-Instruct', 3.086), ('Qwen2.5-7B-Instruct', 7.616),
    ('Qwen2.5-14B-Instruct', 14.770), ('Qwen2.5-32B-Instruct', 32.764)])  # fmt: skip
def test_sizes_go_by_name_where_there_is_no_folder(name, billions):
    config = base.get_config('7b')
    config.model.path = f'nowhere/{name}'
    sizes = plan_programs.model_config(config)
    params = jax.eval_shape(functools.partial(model.init_params, sizes), jax.random.key(0))
    number = sum(x.size for x in jax.tree.leaves(params))
    assert number == plan_costs.num_params(sizes) and number / 1e9 == pytest.approx(billions, abs=6e-4)  # the published counts
    assert sizes.dtype == 'bfloat16' and sizes.remat == 'full'


def test_a_folder_goes_before_its_name(tmp_path):
    folder = tmp_path / 'Qwen2.5-7B'
    folder.mkdir()
    assert plan_programs.model_config(small_config(folder)).embed_dim == SMALL.embed_dim


def test_fields_of_a_slice_may_hold_commas():
    assert plan.split('v5e:2x4') == ['v5e:2x4']
    assert plan.split('v5e:2x4+rollout.row_buckets=(32,64)+lora.rank=8,v6e:2x4,v5e:4x4+prompt.buckets=(512, 1024)') == [
        'v5e:2x4+rollout.row_buckets=(32,64)+lora.rank=8', 'v6e:2x4', 'v5e:4x4+prompt.buckets=(512, 1024)']  # fmt: skip


@pytest.mark.parametrize('topology', ['v5e', 'v5e:3x3', 'v9:2x2', 'v5p:2x4', 'cpu:0', 'cpu:many'])
def test_unknown_topologies_list_the_known(topology):
    with pytest.raises(wiring.ConfigError, match=f'--topology={topology}: there are v5e:.*2x4.*v6e:.*v5p:.*2x2x1.*cpu:N'):
        plan.main([f'--topology={topology}'])


@pytest.mark.parametrize(('flags', 'message'), [
    (['--config.model.path=models/Qwen2.5-8B'], r'no folder models/Qwen2.5-8B, and its name is none of Qwen2.5-\{0.5B,1.5B'),
    (['--config.learner.micro_batch=12'], 'learner.micro_batch=12 cannot be split over the 8 devices'),
    (['--config.mesh.data=3', '--config.mesh.fsdp=4'], 'mesh data=3 x fsdp=4 x tensor=1 needs 12 devices, there are 8'),
    (['--config.mesh.fsdp=5', '--config.learner.micro_batch=5', '--config.rollout.row_buckets=(5,)'],
     r'1536\) *: 1536 is not divisible by fsdp=5'),
    (['--config.mesh.fsdp=2', '--config.mesh.tensor=4'], 'tensor=4 does not divide the 2 key/value heads'),
    (['--config.learner.pack_length=2048'], 'learner.pack_length=2048 with 512 reply tokens cannot hold the longest row'),
    (['--config.loss.chunk=100'], 'loss.chunk=100 must divide'),
])  # fmt: skip
def test_what_cannot_work_is_said_before_compiling(flags, message, tmp_path, capsys):
    with pytest.raises(wiring.ConfigError, match=message):
        plan.main(['--config=configs/alfworld_covgpo.py:1.5b', '--topology=cpu:8', f'--out={tmp_path}', *flags])
    assert 'compiling' not in capsys.readouterr().out and not list(tmp_path.iterdir())


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is not None, reason='libtpu is installed')
def test_a_missing_compiler_is_named_with_its_installation():
    with pytest.raises(wiring.ConfigError, match=r'pip install "jax\[tpu\]"'):
        topologies.devices('v5e:2x4')


def test_a_mesh_of_given_devices():
    devices = jax.devices()[4:]
    mesh = sharding.make_mesh(data=2, devices=devices)
    assert dict(mesh.shape) == {'data': 2, 'fsdp': 2, 'tensor': 1} and set(mesh.devices.flat) == set(devices)


def test_collectives_and_temporaries_are_read_from_the_program():
    mesh = sharding.make_mesh()

    def place(*spec) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(mesh, P(*spec))

    def fn(x, w):  # the contracted axis is cut, so partial products have to be added up; then everybody gets the rows
        return jnp.sum(jax.lax.with_sharding_constraint(jnp.sin(x @ w), place()) @ w.T)

    def lowered(x_spec, w_spec):
        return jax.jit(fn).lower(jax.ShapeDtypeStruct((64, 48), jnp.float32, sharding=place(*x_spec)),
                                 jax.ShapeDtypeStruct((48, 80), jnp.float32, sharding=place(*w_spec)))

    alone = lowered((), ()).compile().as_text()
    cut = lowered((None, 'fsdp'), ('fsdp', None)).compile().as_text()
    assert set(plan_hlo.collectives(alone).values()) == {0}
    assert plan_hlo.collectives(cut)['all-reduce'] >= 1
    arrays = plan_hlo.temporaries(alone)
    assert (arrays[0].shape, arrays[0].nbytes) == ('f32[64,80]', 4 * 64 * 80)
    assert plan_hlo.logits(arrays, {80}, {48}).shape == 'f32[64,80]'
    assert plan_hlo.logits(arrays, {80}, {64}) is None  # a matrix of both is weights


TPU_TEXT = """HloModule step, entry_computation_layout={(f32[8,4]{1,0})->f32[8,4]{1,0}}
%all-reduce-scatter.1 (input: bf16[64,8]) -> bf16[8,8] {
  %input = bf16[64,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-reduce.4 = bf16[64,8]{1,0} all-reduce(%input), channel_id=3, to_apply=%add
}
%fused_computation (p: bf16[64,8]) -> bf16[64,8] {
  %big = bf16[640,80]{1,0} broadcast(%p)
}
ENTRY %main (x: f32[8,4]) -> f32[8,4] {
  %ag = (bf16[8,8]{1,0}, bf16[64,8]{1,0}) all-gather-start(%x), channel_id=1
  %ag.done = bf16[64,8]{1,0} all-gather-done(%ag)
  %fusion.1 = bf16[64,8]{1,0} fusion(%ag.done), kind=kLoop, calls=%fused_computation
  %fusion.2 = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} fusion(%fusion.1), kind=kCustom, calls=%all-reduce-scatter.1
  ROOT %out = f32[8,4]{1,0} convert(%fusion.2)
}
"""


def test_a_tpu_program_scatters_sums_by_fusions():
    count = plan_hlo.collectives(TPU_TEXT)
    assert (count['all-gather'], count['reduce-scatter'], count['all-reduce']) == (1, 1, 0)
    assert [array.shape for array in plan_hlo.temporaries(TPU_TEXT)] == ['bf16[64,8]', 'bf16[8,8]']


@pytest.mark.parametrize(('message', 'gib'), [
    ('the total memory required for HLO temporaries (70.65G) exceeds available HBM (15.75G).', (70.65, 15.75)),
    ('Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded hbm capacity by', (17.5, 15.75)),
    ('Used 512.0M of 256.0M hbm', (0.5, 0.25)),
    ('Mosaic failed to compile', None),
])  # fmt: skip
def test_the_compiler_says_how_much_is_missing(message, gib):
    assert plan_hlo.out_of_memory(message) == gib


def record(*, train: float, held: float, sample: float | None = None, kl_coef: float = 0.01, micro_batch: int = 32,
           window: int = 191):
    def program(**more):
        part = {'flops': 2e12, 'bytes': 3e9, 'roofline_s': 0.0125}
        return {'held_gib': held, 'compile_s': 60.0, **more, 'parts': {'one': part}}

    gib = {'arguments': 1.0, 'outputs': 0.5, 'aliased': 0.5, 'temporaries': train - 1.0, 'code': 0.0, 'peak': train}
    array = {'shape': 'f32[4,64,1000]', 'nbytes': 4 * 4 * 64 * 1000, 'made_by': 'fusion'}
    programs = {'train': program(gib=gib, collectives={'all-gather': 7}, largest=array, largest_with_vocabulary=array)}
    if sample:
        programs['sample'] = program(needs_gib=sample, usable_gib=15.75)
    shapes = {'micro_batch': micro_batch, 'length': 256 if window else 400, 'window': window, 'scored': 64, 'chunk': 64, 'rows': 128, 'prompt': 192,
              'action': 64}
    request = {'shapes': shapes, 'loss': {'kl_coef': kl_coef}, 'model': {'vocab_size': 1000, 'remat': 'full', 'lora_rank': 0},
               'gather_weights': True, 'moment_bytes': 8.0}
    return {'request': request, 'chips': 8, 'row_shards': 8, 'usable_gib': 15.75, 'programs': programs}


def test_what_fits_and_what_does_not():
    text = plan_tables.detail(record(train=10.0, held=2.0))
    assert 'fits: 12.00 of 15.75 GiB on each of 8 chips (train needs most)' in text and '7 ag' in text and '12.5' in text
    # logits of 4 of 32 rows, of a quarter of the tokens, in 4 bytes instead of 2
    assert '6.2% of rows x tokens x vocabulary x 2 bytes (50.0% of this for the rows of one chip)' in text
    text = plan_tables.detail(record(train=14.0, held=2.0, sample=70.65))
    assert 'train does NOT fit: 0.25 GiB per chip too much' in text and 'sample does NOT fit: at least 56.90 GiB' in text


def test_advice_depends_on_what_takes_the_memory():
    def advice(**kwargs) -> list[str]:
        made = record(**kwargs)
        return plan_tables.advice('train', made['programs']['train'], made)

    assert advice(train=20.0, held=2.0)[0] == 'loss.chunk=32'  # its largest array are logits
    assert advice(train=20.0, held=2.0)[1] == 'learner.micro_batch=16'
    assert [line.partition(' (')[0] for line in advice(train=3.0, held=14.0)[:2]] == [
        'more chips in mesh.fsdp', 'loss.kl_coef=0']
    assert not any('kl_coef' in line for line in advice(train=3.0, held=14.0, kl_coef=0.0))
    assert any(line.startswith('optimizer.first_moment=bfloat16') for line in advice(train=3.0, held=14.0))
    assert 'learner.pack_length=256' in advice(train=20.0, held=2.0, window=0)  # a prompt and a reply; half would be less
    assert not any('pack_length' in line for line in advice(train=20.0, held=2.0))  # not packed
    made = record(train=10.0, held=2.0, sample=20.0)
    assert plan_tables.advice('sample', made['programs']['sample'], made)[0].startswith('rollout.gather_weights=False')
    assert not any('micro_batch' in line for line in advice(train=20.0, held=2.0, micro_batch=8))  # one row a chip already


def test_the_overview_names_the_program_that_needs_most():
    table = plan_tables.overview({('a', 'v5e:2x4'): record(train=10.0, held=2.0),
                                  ('b', 'v5e:2x4'): record(train=10.0, held=2.0, sample=70.65),
                                  ('a', 'v5e:4x4'): record(train=20.0, held=2.0)})
    cell = '12.0 (train): fits, without logprobs, apply, sample'
    assert table.splitlines() == [
        '| slice | chips | GiB a chip | a | b |', '|---|---|---|---|---|',
        f'| `v5e:2x4` | 8 | 15.75 | {cell} | ≥ 72.7 (sample; train 12.0): **no**, without logprobs, apply |',
        '| `v5e:4x4` | 8 | 15.75 | 22.0 (train): **no**, without logprobs, apply, sample | – |']


def run_plan(*flags: str) -> subprocess.CompletedProcess:
    xla_flags = '--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0'
    return subprocess.run([sys.executable, '-m', 'experiments.plan', *flags], capture_output=True, text=True, check=False,
                          cwd=ROOT, env=os.environ | {'XLA_FLAGS': xla_flags})


def test_the_whole_path_on_eight_devices_and_again(tmp_path, capsys):
    flags = ('--config=configs/alfworld_covgpo.py:smoke', '--topology=cpu:8', f'--out={tmp_path}', '--config.mesh.fsdp=0',
             '--config.learner.micro_batch=16', '--config.prompt.buckets=(64,)', '--config.rollout.row_buckets=(8,)')
    first = run_plan(*flags)
    assert first.returncode == 0, first.stderr
    (path,) = tmp_path.glob('alfworld_covgpo-smoke*cpu-8.json')
    made = json.loads(path.read_text())
    assert list(made['programs']) == list(plan_programs.PROGRAMS) and made['devices']['fsdp'] == 8 and made['row_shards'] == 8
    for name, program in made['programs'].items():
        gib = program['gib']
        assert gib['peak'] >= gib['arguments'] > 0 and f'compiling {name}' in first.stdout
        assert program['parts'] and all(part['flops'] > 0 and part['bytes'] > 0 for part in program['parts'].values())
    train = made['programs']['train']
    assert train['collectives']['all-gather'] > 0  # parameters are cut, products need them whole
    params = plan_costs.num_params(model.QwenConfig(**made['request']['model'])) * 4 / 8 / 2**30
    assert train['gib']['arguments'] > 2 * params and train['held_gib'] > 3 * params  # with moments, and the reference policy

    plan.main(flags)  # in this process, which has eight devices too
    again, table = capsys.readouterr().out, first.stdout[first.stdout.index('program '):]
    assert 'compiling' not in again and again.endswith(table)
    made['request']['shapes']['chunk'] = 8
    path.write_text(json.dumps(made))
    with pytest.raises(wiring.ConfigError, match='was made with other settings .shapes.chunk 8 -> 16.'):
        plan.main(flags)


def test_too_few_cpu_devices_are_named():
    with pytest.raises(wiring.ConfigError, match='JAX sees 8 CPU .*XLA_FLAGS=--xla_force_host_platform_device_count=16'):
        topologies.devices('cpu:16')


@pytest.mark.slow
def test_a_small_model_for_a_real_slice(tmp_path):
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed; pip install "jax[tpu]"')
    (tmp_path / 'model').mkdir()
    small_config(tmp_path / 'model')
    run = run_plan('--config=configs/alfworld_covgpo.py:1.5b', '--topology=v5e:2x4', f'--out={tmp_path}',
                   f'--config.model.path={tmp_path / "model"}', '--config.prompt.buckets=(128,)',
                   '--config.prompt.max_action=64', '--config.learner.pack_length=256', '--programs=train,apply')
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.glob('*.json')
    made = json.loads(path.read_text())
    assert made['chips'] == 8 and made['compiler'].startswith('libtpu') and plan_tables.fits(made)
    assert sum(made['programs']['train']['collectives'].values()) > 0
    assert made['programs']['train']['parts']['train']['roofline_s'] > 0
    assert 'fits: ' in run.stdout
