"""GraphGPO, WebShop. The published recipe also shows the rich pages: --config.env.observation=text_rich.

python -m experiments.train --config=configs/webshop_graphgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/webshop_graphgpo.py:1.5b     2 x H100 or v5p-8; published: score 89.3 +- 1.5, success 78.7 +- 3.9 %
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset, 'webshop')
    config.experiment = 'webshop_graphgpo'
    config.advantage.estimator = 'graphgpo'
    config.env.observation = 'rich_state'  # states are told apart by the text_rich page, which shows the chosen options
    return config
