"""HGPO, WebShop. The published runs play 30 steps: --config.env.max_steps=30.

python -m experiments.train --config=configs/webshop_hgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_hgpo.py:1.5b     2 x H100 or v5p-8
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_hgpo'
    config.advantage.estimator = 'hgpo'
    return config
