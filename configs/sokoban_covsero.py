"""CovGPO and SERO together, Sokoban.

python -m experiments.train --config=configs/sokoban_covsero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/sokoban_covsero.py:1.5b     2 x H100 or v5p-8; no published figure
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'sokoban')
    config.experiment = 'sokoban_covsero'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    config.env.sokoban.reward = 'success'  # native step rewards would keep every group's score from being zero
    config.sero.variant = 'sero'
    return config
