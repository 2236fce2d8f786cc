"""CovGPO and SERO together, ALFWorld: coverage ranks all-failed groups, an oracle shows what all of their rollouts missed.

python -m experiments.train --config=configs/alfworld_covsero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_covsero.py:1.5b     2 x H100 or v5p-8; no published figure
python -m experiments.train --config=configs/alfworld_covsero.py --config.advantage.estimator=hgpo     on another base

The two do not touch each other: CovGPO changes advantages of the rollouts, SERO adds a term that no rollout enters.
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_covsero'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    config.sero.variant = 'sero'
    return config
