"""SERO on GraphGPO, WebShop: from pages that failed rollouts reached, a rule-based oracle buys the right product; its
commands are learned, each weighted by how reachable it is for the policy.

python -m experiments.train --config=configs/webshop_sero.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_sero.py:1.5b     2 x H100 or v5p-8; the paper: score 88.9, success 79.3 %
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_sero'
    config.advantage.estimator = 'graphgpo'
    config.env.observation = 'rich_state'  # states are told apart by the text_rich page, which shows the chosen options
    config.sero.variant = 'sero'
    return config
