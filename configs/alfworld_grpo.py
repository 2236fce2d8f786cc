"""GRPO, ALFWorld.

python -m experiments.train --config=configs/alfworld_grpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_grpo.py:1.5b     2 x H100 or v5p-8; published: 72.8 +- 3.6 % on valid_seen (arXiv 2505.10978)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_grpo'
    config.advantage.estimator = 'grpo'
    return config
