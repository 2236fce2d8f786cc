"""Multi-turn DAPO: GRPO with a higher upper clip bound and dynamic sampling (arXiv 2503.14476), ALFWorld.

python -m experiments.train --config=configs/alfworld_dapo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_dapo.py:1.5b     2 x H100 or v5p-8; no published figure on ALFWorld (WebShop: 66.1 %, GRPO 56.8 %)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_dapo'
    config.advantage.estimator = 'grpo'
    config.loss.clip_high = 0.28
    config.rollout.max_batches = 10  # groups whose episodes all score the same are replaced; the last batch is kept as it is
    return config
