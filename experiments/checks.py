"""Everything about a configuration that can be checked cheaply, before any long work starts."""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from covsero_jax import advantages, oracle, packing, sharding
from experiments import environments, wiring


def check(config: ConfigDict) -> None:
    """Fields that depend on each other or on this machine. Raises wiring.ConfigError."""
    if config.advantage.estimator not in advantages.ESTIMATORS:
        raise wiring.ConfigError(f'advantage.estimator={config.advantage.estimator!r}; there are {", ".join(advantages.ESTIMATORS)}')
    if config.advantage.normalisation not in advantages.NORMALISATIONS:
        raise wiring.ConfigError(f'advantage.normalisation={config.advantage.normalisation!r}; there are '
                                 f'{", ".join(advantages.NORMALISATIONS)}')
    for section, build in (('coverage', wiring.coverage_config), ('loss', wiring.loss_config), ('rollout', wiring.band_config),
                           ('sero', wiring.weight_config), ('optimizer', wiring.optimizer_config), ('learner', wiring.pack_config)):
        try:
            build(config)
        except (TypeError, ValueError) as error:
            raise wiring.ConfigError(f'{section}: {error}') from error
    if config.rollout.group_size < 2:
        raise wiring.ConfigError(f'rollout.group_size={config.rollout.group_size}: a group of one has nothing to be compared with')
    if config.rollout.max_batches < 1:
        raise wiring.ConfigError(f'rollout.max_batches={config.rollout.max_batches} must be at least 1')
    shards = sharding.num_row_shards(wiring.make_mesh(config))
    if config.learner.minibatch % config.learner.micro_batch or config.learner.micro_batch % shards:
        raise wiring.ConfigError(f'learner.micro_batch={config.learner.micro_batch} must divide learner.minibatch='
                                 f'{config.learner.minibatch} and be divisible by the {shards} devices of the mesh (data x fsdp)')
    if config.prompt.max_action % config.loss.chunk:
        raise wiring.ConfigError(f'loss.chunk={config.loss.chunk} must divide prompt.max_action={config.prompt.max_action}')
    if pack := wiring.pack_config(config):
        check_packing(config, pack)
    if config.rollout.temperature <= 0:
        raise wiring.ConfigError(f'rollout.temperature={config.rollout.temperature} must be positive')
    coverage = wiring.coverage_config(config)
    if coverage.is_gated and not coverage.is_off and (config.env.name, config.env.sokoban.reward) == ('sokoban', 'native'):
        raise wiring.ConfigError("env.sokoban.reward='native' gives every step a reward, so no group's scores are zero and "
                                 "CovGPO's gate can never open; use --config.env.sokoban.reward=success")
    _check_model_folder(config)
    _check_memory(config)
    environments.check(config)
    if wiring.uses_oracle(config):
        _check_oracle(config)


def check_packing(config: ConfigDict, pack: packing.PackConfig) -> None:
    longest = max(config.prompt.buckets) + config.prompt.max_action
    slots = [pack.max_actions(length) for length in pack.lengths]
    if pack.length < longest or slots[-1] < config.prompt.max_action:
        raise wiring.ConfigError(
            f'learner.pack_length={pack.length} with {slots[-1]} reply tokens cannot hold the longest row: {longest} tokens, '
            f'{config.prompt.max_action} of them of the reply (prompt.buckets, prompt.max_action)')
    if any(slot > config.loss.chunk and slot % config.loss.chunk for slot in slots):
        raise wiring.ConfigError(f'loss.chunk={config.loss.chunk} must divide the reply tokens of packed sequences, {slots} '
                                 '(learner.pack_length, learner.pack_actions)')


def _check_oracle(config: ConfigDict) -> None:
    s = config.sero
    if s.coef < 0:
        raise wiring.ConfigError(f'sero.coef={s.coef} must not be negative')
    for name, value, known in (('restoration', s.restoration, oracle.RESTORATION), ('roots', s.roots, ('in_time', 'all')),
                               ('root_sampling', s.root_sampling, oracle.ROOT_SAMPLING)):
        if value not in known:
            raise wiring.ConfigError(f'sero.{name}={value!r}; there are {", ".join(known)}')
    environments.check_oracle(config)


def _check_model_folder(config: ConfigDict) -> None:
    folder = wiring.model_folder(config)
    if not (folder / 'config.json').is_file():
        name = folder.name
        raise wiring.ConfigError(
            f'model.path: there is no model in {folder}.'
            + (f' Download it once, for example: hf download Qwen/{name} --local-dir models/{name}'
               if name.startswith('Qwen') else ' Give a Hugging Face Qwen2 folder with --config.model.path=FOLDER'))


def _check_memory(config: ConfigDict) -> None:
    need = config.mesh.min_memory_gib
    if not need:
        return
    here = sum((device.memory_stats() or {}).get('bytes_limit', 0) for device in jax.local_devices())
    have = here * jax.process_count() / 2**30
    if have < need:
        kinds = f'{jax.device_count()} x {jax.devices()[0].device_kind}'
        raise wiring.ConfigError(
            f'preset {config.preset} needs about {need} GiB of accelerator memory, this machine has {have:.0f} ({kinds}). '
            f'The tiny preset runs anywhere; --config.mesh.min_memory_gib=0 starts regardless')
