"""GiGPO, WebShop.

python -m experiments.train --config=configs/webshop_gigpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_gigpo.py:1.5b     2 x H100 or v5p-8; published: score 83.5, success 67.4 +- 4.5 % (arXiv 2505.10978)
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_gigpo'
    config.advantage.estimator = 'gigpo'
    return config
