"""One generated ALFWorld game as text: entity names, the PDDL problem, and the records of its three files.

The domain and the text grammar of `data/` are short forms of ALFWorld's own. The official engine plays them with the
same words and the same admissible commands.
"""

from __future__ import annotations

import functools
import json
import pathlib
import random
from collections.abc import Iterable
from collections.abc import Set as AbstractSet

DATA = pathlib.Path(__file__).parent / 'data'

# Types that the domain's actions name: the planner exits when a problem does not declare them, used or not.
ACTION_TYPES = (('SinkBasin', 'rtype'), ('Microwave', 'rtype'), ('Fridge', 'rtype'), ('Knife', 'otype'),
                ('ButterKnife', 'otype'))


def entity_names(rng: random.Random, kind: str, count: int) -> list[str]:
    """Different ids such as `Mug_bar__plus_02_dot_22_bar_...`: type and coordinates. Players see them numbered.

    A basin is called after its sink or bathtub, with its own type at the end, as in ALFRED.
    """
    found: dict[str, None] = {}
    while len(found) < count:
        parts = [kind.removesuffix('Basin'), *(f'{rng.uniform(-4, 4):+06.2f}' for _ in range(3))]
        found[_identifier('|'.join(parts + [kind] * kind.endswith('Basin')))] = None
    return list(found)


def location_names(rng: random.Random, count: int, taken: AbstractSet[str] = frozenset()) -> list[str]:
    """`count` different locations that are not in `taken`: x, z, rotation and camera angle, as in ALFRED."""
    found: dict[str, None] = {}
    while len(found) < count:
        x, z = rng.randint(-12, 12), rng.randint(-12, 12)
        name = _identifier(f'loc|{x}|{z}|{rng.randrange(4)}|{rng.choice((30, 45, 60))}')
        if name not in taken:
            found[name] = None
    return list(found)


def _identifier(text: str) -> str:
    return text.replace('|', '_bar_').replace('+', '_plus_').replace('-', '_minus_').replace('.', '_dot_')


def problem(name: str, entities: Iterable[tuple[str, str]], facts: Iterable[str], goal: str) -> str:
    """The PDDL problem. entities: (name, PDDL type) pairs, without agent1; goal: a text from `goal_text`."""
    declared = {*entities, *((f'{kind}Type', group) for kind, group in ACTION_TYPES)}
    return '\n'.join((
        f'(define (problem {name})', '(:domain alfred)', '(:objects', 'agent1 - agent',
        *(f'{entity} - {group}' for entity, group in sorted(declared)), ')',
        '(:init', *(f'({fact})' for fact in facts), ')', goal, ')', ''))


def goal_text(target: str, place: str, *, lamp: bool = False, copies: int = 1, condition: str = '') -> str:
    """Hold a `target` at a lit `place` (a lamp), or have 1 or 2 targets, each with `condition`, in one `place`."""
    if lamp:
        return f"""(:goal (and
  (exists (?ot - object ?r - receptacle ?a - agent ?l - location)
    (and (objectType ?ot {place}Type) (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l)
      (inReceptacle ?ot ?r)))
  (exists (?o - object ?a - agent) (and (objectType ?o {target}Type) (holds ?a ?o)))))"""
    if copies == 2:
        return f"""(:goal (exists (?r - receptacle) (exists (?o1 - object)
  (and (objectType ?o1 {target}Type) (receptacleType ?r {place}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object)
    (and (not (= ?o1 ?o2)) (objectType ?o2 {target}Type) (receptacleType ?r {place}Type) (inReceptacle ?o2 ?r)))))))"""
    return f"""(:goal (exists (?r - receptacle) (exists (?o - object)
  (and {condition}(objectType ?o {target}Type) (receptacleType ?r {place}Type) (inReceptacle ?o ?r)))))"""


@functools.cache
def _rules() -> tuple[str, str]:
    return ((DATA / 'alfworld_domain.pddl').read_text(encoding='utf-8'),
            (DATA / 'alfworld_grammar.twl2').read_text(encoding='utf-8'))


def game_files(trial: str, task_type: str, task: str, problem_text: str, walkthrough: Iterable[str], scene: int,
               pddl_params: dict) -> dict[str, str]:
    """File name -> contents of one game's folder. ALFWorld keeps the task sentence inside the grammar."""
    domain, grammar = _rules()
    game = {
        'pddl_domain': domain, 'grammar': grammar.replace('UNKNOWN GOAL', task), 'pddl_problem': problem_text,
        'solvable': True, 'walkthrough': list(walkthrough)}
    annotation = {'assignment_id': 'generated', 'task_desc': f'{task}.', 'high_descs': [], 'votes': []}
    trajectory = {
        'task_id': trial, 'task_type': task_type, 'pddl_params': pddl_params, 'images': [],
        'plan': {'high_pddl': [], 'low_actions': []},
        'scene': {'floor_plan': f'FloorPlan{scene}', 'scene_num': scene},
        'turk_annotations': {'anns': [annotation]}}
    return {'game.tw-pddl': json.dumps(game), 'traj_data.json': json.dumps(trajectory),
            'initial_state.pddl': problem_text}
