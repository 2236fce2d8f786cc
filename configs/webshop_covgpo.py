"""CovGPO on GiGPO, WebShop: when every rollout of a group fails, they are ranked by first-visit coverage of page texts.

python -m experiments.train --config=configs/webshop_covgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_covgpo.py:1.5b     2 x H100 or v5p-8; the paper has it at score 85.6, success 72.4 %
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_covgpo'
    config.advantage.estimator = 'gigpo'
    config.coverage.variant = 'covgpo'
    return config
