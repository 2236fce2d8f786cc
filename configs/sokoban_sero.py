"""SERO on GiGPO, Sokoban: from states that failed rollouts reached, a move-optimal solver finishes the level.

python -m experiments.train --config=configs/sokoban_sero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/sokoban_sero.py:1.5b     2 x H100 or v5p-8; no published figure
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'sokoban')
    config.experiment = 'sokoban_sero'
    config.advantage.estimator = 'gigpo'
    config.sero.variant = 'sero'
    return config
