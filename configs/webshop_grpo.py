"""GRPO, WebShop.

python -m experiments.train --config=configs/webshop_grpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_grpo.py:1.5b     2 x H100 or v5p-8; published: score 75.8 +- 3.5, success 56.8 +- 3.8 % (arXiv 2505.10978)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_grpo'
    config.advantage.estimator = 'grpo'
    return config
