"""From a ConfigDict to the parts of a run: the only place where configuration meets the library."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from absl import app, flags
from ml_collections import ConfigDict, config_flags

from covsero_jax import (
    bank,
    checkpoint,
    coverage,
    evaluate,
    hosts,
    learner,
    model,
    objective,
    packing,
    pretrained,
    prompts,
    reachability,
    sampler,
    sharding,
    trajectory,
    workers,
)
from covsero_jax.envs import alfworld_data, cache
from covsero_jax.envs.webshop import catalogue
from experiments import environments

QUOTES = '"\''


PURPOSES = {  # keeps the random draws of one update apart
    'sample': 0, 'rows': 1, 'evaluate': 2, 'coverage': 3, 'roots': 4, 'oracle_rows': 5, 'shuffle': 6, 'adapters': 7,
}


ConfigError = environments.ConfigError


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that a user can mend end the program with their message, not with a traceback."""
    try:
        yield
    except (ConfigError, pretrained.PretrainedError, alfworld_data.AlfworldDataError, catalogue.WebshopDataError,
            checkpoint.CheckpointError, hosts.HostError,
            bank.BankError, workers.WorkerError, ImportError, OSError) as error:
        sys.exit(f'error: {error}')
    except AttributeError as error:
        if 'ml_collections' not in traceback.extract_tb(error.__traceback__)[-1].filename:
            raise
        inner = error.args[0].args[0] if isinstance(error.args[0], KeyError) else str(error)
        field, *hint = inner.splitlines()
        sys.exit(f'error: there is no configuration field {field.strip(QUOTES)}; configs/base.py lists them all. '
                 + ' '.join(hint))


def define_config(what: str):
    """The --config flag. Overrides of fields that do not exist end the program with one line."""
    with one_line_errors():
        return config_flags.DEFINE_config_file('config', 'configs/alfworld_covgpo.py', what)


def read_config(arguments: Sequence[str]) -> ConfigDict:
    """The configuration that `experiments.train` gets from these flags, unchecked. ConfigError for flags that do not exist."""
    argv = ['train', *arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file('config', flag_values=values, sys_argv=argv)
    try:
        values(argv)
    except flags.Error as error:
        raise ConfigError(str(error)) from error
    return values.config


def run_main(main: Callable[[Sequence[str]], None]) -> None:
    """absl's app.run, with one line for flags and configuration fields that do not exist."""

    def parse(argv: list[str]) -> list[str]:
        try:
            return flags.FLAGS(argv)
        except flags.Error as error:
            sys.exit(f'error: {str(error).strip().splitlines()[-1].strip()}')

    with one_line_errors():
        app.run(main, flags_parser=parse)


class Policy(NamedTuple):
    """A loaded model folder."""

    folder: pathlib.Path
    config: model.QwenConfig
    params: model.Params  # on `mesh`; None where they have gone into a training state
    mesh: jax.sharding.Mesh
    tokenizer: Any
    eos_ids: tuple[int, ...]  # what ends a reply: the tokenizer's end token, and those of generation_config.json


def draw_key(seed: int, update: int, purpose: str) -> jax.Array:
    """The PRNG key of one purpose in one update. Evaluation uses update 0 always."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), update), PURPOSES[purpose])


def use_compilation_cache(enabled: bool) -> None:
    """Keep compiled programs for the next start. Call before anything is compiled."""
    if enabled:
        jax.config.update('jax_compilation_cache_dir', str(cache.folder() / 'compiled'))
        jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def uses_oracle(config: ConfigDict) -> bool:
    """Whether the training environments of this run need an oracle. A bank of branches needs none."""
    return config.sero.variant != 'off' and not config.sero.bank


def needed_steps(config: ConfigDict, pool: workers.WorkerPool) -> tuple[int, ...]:
    """Steps that the oracle needs for each task, where roots are to respect them; () = roots anywhere."""
    return pool.oracle_steps if config.sero.roots == 'in_time' else ()


def model_folder(config: ConfigDict) -> pathlib.Path:
    return pathlib.Path(config.model.path) if config.model.path else environments.TINY_POLICIES[environments.family(config)]


def load_policy(config: ConfigDict, folder: pathlib.Path | None = None) -> Policy:
    """The model folder of the configuration, or another one, on the devices. Raises pretrained.PretrainedError."""
    folder, mesh = folder or model_folder(config), make_mesh(config)
    model_config, params = pretrained.load_folder(
        folder, mesh, dtype=config.model.dtype, remat=config.model.remat,
        attention_chunk=config.model.attention_chunk, lora_rank=config.lora.rank, lora_alpha=config.lora.alpha)
    try:
        sharding.check_model(mesh, model_config.num_kv_heads)
    except ValueError as error:
        raise ConfigError(f'mesh: {error}') from error
    if config.lora.rank:
        make = jax.jit(functools.partial(model.lora_params, model_config), out_shardings=sharding.replicated(mesh))
        params = model.join_params(make(draw_key(config.seed, 0, 'adapters')), params)
    tokenizer = pretrained.load_tokenizer(folder)
    return Policy(folder, model_config, params, mesh, tokenizer, pretrained.eos_ids(folder, tokenizer))


def make_act(config: ConfigDict, policy: Policy, params: model.Params, *, key: jax.Array, temperature: float,
             bands: sampler.Bands | None = None) -> trajectory.Policy:
    """What rollouts call: the sampler with `params`, as the configuration says."""
    mesh, params = hosts.local_copy(policy.mesh, params)
    if config.rollout.gather_weights:
        params = sharding.copy_params(mesh, params, policy.config.dtype, gather=True)
    try:
        return sampler.make_policy(
            params, config=policy.config, key=key, buckets=config.prompt.buckets, row_buckets=config.rollout.row_buckets,
            max_new_tokens=config.prompt.max_action, temperature=temperature, eos_ids=policy.eos_ids, bands=bands, mesh=mesh)
    except ValueError as error:
        raise ConfigError(f'rollout.row_buckets: {error}') from error


def make_mesh(config: ConfigDict, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The devices of a run, as config.mesh says. Raises ConfigError when there are too few."""
    try:
        mesh = sharding.make_mesh(data=config.mesh.data, fsdp=config.mesh.fsdp or None, tensor=config.mesh.tensor,
                                  devices=devices)
    except ValueError as error:
        raise ConfigError(f'mesh: {error}') from error
    if hosts.count() > 1 and (mesh.size != jax.device_count() or jax.local_device_count() % config.mesh.tensor):
        raise ConfigError(f'mesh: data x fsdp x tensor is {mesh.size}; several hosts need a mesh of all their {jax.device_count()} '
                          f'devices (fsdp=0 takes what is left), and tensor within the {jax.local_device_count()} of one host')
    return mesh


def make_pool(config: ConfigDict, split: str, num_envs: int, *, oracle: str = '') -> workers.WorkerPool:
    """Environments over one split. Evaluation pools are always built without an oracle."""
    return workers.WorkerPool(
        environments.env_factory(config, split, oracle=oracle), num_envs=num_envs, num_workers=min(config.env.num_workers, num_envs),
        timeout_s=config.env.timeout_s)


def make_prompts(config: ConfigDict, tokenizer: Any) -> prompts.ChatPrompts:
    return prompts.ChatPrompts(tokenizer, wording=config.prompt.wording, environment=environments.family(config),
                               history=config.prompt.history,
                               max_prompt=max(config.prompt.buckets))


def coverage_config(config: ConfigDict) -> coverage.CoverageConfig:
    return coverage.CoverageConfig(**config.coverage)


def band_config(config: ConfigDict) -> sampler.Bands | None:
    """Band-conditioned sampling of training rollouts, or None."""
    r = config.rollout
    return sampler.Bands(mix=r.band_mix, head=r.band_head, floor=r.band_floor) if r.band_mix else None


def loss_config(config: ConfigDict) -> objective.LossConfig:
    return objective.LossConfig(**config.loss, temperature=config.rollout.temperature, oracle_coef=config.sero.coef,
                              oracle_nll=config.sero.nll)


def weight_config(config: ConfigDict) -> reachability.WeightConfig:
    s = config.sero
    return reachability.WeightConfig(variant=s.variant, bridge=s.bridge, decay=s.decay, match_mass=s.match_mass)


def bank_identity(config: ConfigDict, policy: Policy, task_names: Sequence[str]) -> dict[str, object]:
    """What a bank of oracle branches must have in common with the run that replays it (bank.MUST_MATCH)."""
    vocabulary = sorted(policy.tokenizer.get_vocab().items())
    shown = 'enriched' if config.env.observation == 'enriched' else 'raw'  # 'enriched_state' is only compared
    return {
        'tokenizer': hashlib.sha256(repr((vocabulary, policy.tokenizer.chat_template)).encode()).hexdigest()[:16],
        'environment': config.env.name,
        'games': evaluate.manifest_hash(task_names)[:16],
        'prompt': f'{config.prompt.wording}, history {config.prompt.history}, observation {shown}',
        'horizon': config.env.max_steps,
    }


def pack_config(config: ConfigDict) -> packing.PackConfig | None:
    """How rows share sequences in the learner, or None."""
    c = config.learner
    return packing.PackConfig(c.pack_length, c.pack_rows, c.pack_actions) if c.pack_length else None


def optimizer_config(config: ConfigDict) -> learner.OptimizerConfig:
    return learner.OptimizerConfig(**config.optimizer)


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = '') -> list[str]:
    """The fields in which two configurations (as JSON) differ, with both values."""
    out = []
    for name in sorted({*old, *new}):
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            out += differences(a, b, f'{prefix}{name}.')
        elif a != b:
            out.append(f'{prefix}{name} {a!r} -> {b!r}')
    return out


def default_workdir(config: ConfigDict) -> pathlib.Path:
    return pathlib.Path('runs') / f'{config.experiment}-{config.preset}-seed{config.seed}'


def limit_preallocation() -> None:
    """JAX would take 75 % of a GPU at once, before it is known what is needed. Must run before JAX starts its backend."""
    os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
