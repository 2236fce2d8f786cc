"""GiGPO, Sokoban as a text grid.

python -m experiments.train --config=configs/sokoban_gigpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/sokoban_gigpo.py:1.5b     2 x H100 or v5p-8; published with a vision model: 81.0 % (verl-agent)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'sokoban')
    config.experiment = 'sokoban_gigpo'
    config.advantage.estimator = 'gigpo'
    return config
