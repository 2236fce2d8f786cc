"""GraphGPO, ALFWorld.

python -m experiments.train --config=configs/alfworld_graphgpo.py          tiny preset: CPU, minutes
python -m experiments.train --config=configs/alfworld_graphgpo.py:1.5b     2 x H100 or v5p-8; published: 92.7 +- 1.3 % on valid_seen (arXiv 2605.26684)

The published figure is with --config.env.observation=enriched. Raw texts do not say what the agent holds: the place where
the goal was once reached is then one step from success with empty hands, too, and taking the object leads away from it.
"""

from configs import base


def get_config(preset: str = 'tiny'):
    config = base.get_config(preset)
    config.experiment = 'alfworld_graphgpo'
    config.advantage.estimator = 'graphgpo'
    config.advantage.goal_discount = 0.1  # the recipe's for ALFWorld; WebShop 0.2, Sokoban 0.8
    return config
