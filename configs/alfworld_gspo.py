"""GSPO: GRPO advantages, importance ratio and clipping of whole replies (arXiv 2507.18071), ALFWorld.

python -m experiments.train --config=configs/alfworld_gspo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_gspo.py:1.5b     2 x H100 or v5p-8; no published figure
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_gspo'
    config.advantage.estimator = 'grpo'
    config.loss.policy_loss = 'gspo'
    config.loss.clip_low, config.loss.clip_high = 3e-4, 4e-4
    config.loss.aggregation = 'sequence'
    return config
