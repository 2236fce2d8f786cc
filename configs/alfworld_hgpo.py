"""HGPO, ALFWorld.

python -m experiments.train --config=configs/alfworld_hgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_hgpo.py:1.5b     2 x H100 or v5p-8; published: 92.8 +- 1.1 % on valid_seen (arXiv 2602.22817)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_hgpo'
    config.advantage.estimator = 'hgpo'
    config.advantage.history_depth = 3  # contexts of 0, 1 and 2 earlier observations: the prompt's history of 2
    return config
