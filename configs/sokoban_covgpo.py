"""CovGPO on GiGPO, Sokoban: all-failed groups are ranked by first-visit coverage of grids.

python -m experiments.train --config=configs/sokoban_covgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/sokoban_covgpo.py:1.5b     2 x H100 or v5p-8; the paper explores a visual variant only
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'sokoban')
    config.experiment = 'sokoban_covgpo'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    config.env.sokoban.reward = 'success'  # native step rewards would keep every group's score from being zero
    return config
