"""CovGPO and SERO together, WebShop.

python -m experiments.train --config=configs/webshop_covsero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_covsero.py:1.5b     2 x H100 or v5p-8; no published figure
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_covsero'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    config.sero.variant = 'sero'
    return config
