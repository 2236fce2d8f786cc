"""Write a run's policy as a Hugging Face folder that transformers (and vLLM) load unchanged.

    python -m experiments.export --config=configs/alfworld_covgpo.py --workdir=runs/NAME --out=FOLDER [--which=latest]
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags, logging

from covsero_jax import pretrained
from experiments import evaluate, wiring


def main(argv: Sequence[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config = _CONFIG.value
    policy = wiring.load_policy(config)
    params, update = evaluate.checkpoint_params(config, policy, pathlib.Path(_WORKDIR.value), _WHICH.value)
    pretrained.save_folder(_OUT.value, policy.config, params, tokenizer_from=policy.folder, dtype=_DTYPE.value)
    print(f'results: {_OUT.value} ({_WHICH.value} checkpoint, update {update}, {_DTYPE.value})')


if __name__ == '__main__':
    _CONFIG = wiring.define_config('the experiment of the run')
    _WORKDIR = flags.DEFINE_string('workdir', None, 'the run', required=True)
    _WHICH = flags.DEFINE_enum('which', 'best', ['best', 'latest'], 'which checkpoint of the run')
    _OUT = flags.DEFINE_string('out', None, 'folder to write; must not exist', required=True)
    _DTYPE = flags.DEFINE_enum('dtype', 'float32', ['float32', 'bfloat16'], 'of the stored tensors')
    wiring.run_main(main)
