"""Every field of every experiment, one comment each. Experiment files change a few of them; presets change the scale.

Presets (`--config=configs/<experiment>.py:<preset>`):
  tiny   (default) generated games, the packaged tiny policy; learns on two CPU cores in minutes
  smoke  the same, two short updates: does everything run?
  1.5b   Qwen2.5-1.5B-Instruct at the papers' scale
  7b     Qwen2.5-7B-Instruct at the papers' scale
The papers' values are those of verl-agent's run scripts, which GiGPO, HGPO, GraphGPO, CovGPO and SERO share.
Environments: get_config(preset, 'alfworld' | 'webshop' | 'sokoban').
"""

from ml_collections import ConfigDict

PRESETS = ('tiny', 'smoke', '1.5b', '7b')
ENVIRONMENTS = ('alfworld', 'webshop', 'sokoban')


def get_config(preset: str = 'tiny', environment: str = 'alfworld') -> ConfigDict:
    """All fields at the values of `preset` for `environment`. Raises ValueError for one that does not exist."""
    preset = preset or 'tiny'
    if preset not in PRESETS:
        raise ValueError(f'preset {preset!r} does not exist; there are {", ".join(PRESETS)}')
    if environment not in ENVIRONMENTS:
        raise ValueError(f'environment {environment!r} does not exist; there are {", ".join(ENVIRONMENTS)}')
    config = _paper()
    config.preset = preset
    if environment == 'webshop':
        _webshop(config)
    if environment == 'sokoban':
        _sokoban(config)
    if preset in ('tiny', 'smoke'):
        _tiny(config)
        if environment == 'webshop':
            _tiny_webshop(config)
        if environment == 'sokoban':
            _tiny_sokoban(config)
    if preset == 'smoke':
        _smoke(config)
    if preset == '7b':
        config.model.path = 'models/Qwen2.5-7B-Instruct'
        config.mesh.min_memory_gib = 320
    return config


def _paper() -> ConfigDict:
    """ALFWorld with Qwen2.5-1.5B-Instruct, as published."""
    c = ConfigDict()
    c.preset = '1.5b'
    c.experiment = ''  # set by the experiment file; part of the default workdir
    c.seed = 0  # decides every random draw of a run
    c.updates = 150  # rollout + learning rounds ("epochs" in the papers)

    c.env = ConfigDict()
    c.env.name = 'alfworld'  # 'webshop' | 'sokoban' | 'module:factory', your own: factory(split=, max_steps=, oracle=) -> envs.base.Env
    c.env.engine = 'native'  # 'native' (ours) | 'textworld' (official; pip install -e ".[alfworld]")
    c.env.observation = 'raw'  # 'enriched': with a summary of the episode, as GraphGPO's recipe; 'enriched_state': only compared
    #   WebShop: 'text' | 'text_rich' (marks buttons and what was clicked, GraphGPO's recipe) | 'rich_state': only compared
    c.env.data = 'ALFWORLD_DATA'  # 'generated' | 'ALFWORLD_DATA', 'WEBSHOP_DATA' (the variables) | a folder, of Sokoban also a file
    c.env.difficulty = 'real'  # of generated games: tiny | small | medium | real
    c.env.games_seed = 0  # of generated games; not the run's seed, so that seeds are compared on the same games
    c.env.num_train = 1000  # generated games per split
    c.env.num_valid = 100
    c.env.train_split = 'train'
    c.env.max_steps = 50  # per episode
    c.env.success_reward = 10.0
    c.env.num_workers = 16  # processes; 0 = inside this process
    c.env.timeout_s = 60.0  # a worker that takes longer for one step is restarted
    c.env.webshop = ConfigDict()  # arguments of envs.webshop.env.make_env, whose docstring explains each
    c.env.webshop.num_products = 1000  # of the generated catalogue
    c.env.webshop.catalogue_seed = 0
    c.env.webshop.goals = 'synthetic'  # 'synthetic' (one per combination of options; the papers') | 'human'
    c.env.webshop.split_by = 'product'  # 'product' (no product is in two splits) | 'index233' | 'verl_agent' (leaks)
    c.env.webshop.option_match = 'webshop'  # 'webshop' (with its fault) | 'by_value'
    c.env.webshop.drop_unattainable = False  # leave out goals that this fault makes impossible
    c.env.webshop.show_attributes = False  # a button for the list of attributes
    c.env.sokoban = ConfigDict()  # arguments of envs.sokoban.make_env
    c.env.sokoban.height, c.env.sokoban.width, c.env.sokoban.boxes = 6, 6, 1
    c.env.sokoban.min_moves, c.env.sokoban.max_moves = 4, 12  # of the shortest solution
    c.env.sokoban.reward = 'native'  # 'native' (-0.1 a step, +-1 a box, +10 solved) | 'success' (CovGPO's gate needs zeros)

    c.model = ConfigDict()
    c.model.path = 'models/Qwen2.5-1.5B-Instruct'  # Hugging Face folder; '' = the packaged tiny policy
    c.model.dtype = 'bfloat16'  # of matrix products; parameters are float32 masters
    c.model.remat = 'full'  # what the backward pass computes again: 'none' | 'dots' | 'full', see model.REMAT

    c.model.attention_chunk = 512  # queries whose scores exist at one time, in sequences that are longer; 0 = all

    c.lora = ConfigDict()
    c.lora.rank = 0  # > 0: only adapters beside the matrices learn; the rest is kept in model.dtype, without moments
    c.lora.alpha = 32.0  # their output is scaled by alpha / rank

    c.prompt = ConfigDict()
    c.prompt.wording = 'full'  # 'full' (instruction-tuned models) | 'compact' (the tiny policy)
    c.prompt.history = 2  # observation/action pairs shown
    c.prompt.buckets = (512, 1024, 1536, 2048)  # prompt lengths that are compiled; the last is the limit
    c.prompt.max_action = 512  # reply tokens

    c.rollout = ConfigDict()
    c.rollout.num_groups = 16  # tasks per update
    c.rollout.group_size = 8  # episodes per task
    c.rollout.temperature = 1.0
    c.rollout.max_batches = 1  # > 1: dynamic sampling; roll out again, at most so often, until num_groups have contrast
    c.rollout.band_mix = 0.0  # share of the token probability moved to the mid and low band (band-conditioned sampling)
    c.rollout.band_head = 0.5  # tokens at least so likely are the head band
    c.rollout.band_floor = 0.01  # less likely ones are never favoured
    c.rollout.row_buckets = (32, 64, 128)  # batch sizes that are compiled
    c.rollout.gather_weights = True  # sample from a copy in model.dtype that fsdp does not cut; False: from the shards
    c.rollout.save_trajectories = 10  # write every n-th update's episodes (1 = all, 0 = none)

    c.advantage = ConfigDict()
    c.advantage.estimator = 'gigpo'  # advantages.ESTIMATORS
    c.advantage.options = ConfigDict({  # each estimator's own keyword arguments; its docstring explains them
        'grpo': {'ddof': 1},
        'gigpo': {'step_weight': 1.0, 'ddof': 1},
        'hgpo': {'length_alpha': 1.0, 'weight_offset': 1, 'episode_weight': 0.0, 'ddof': 0},
        'graphgpo': {'step_weight': 1.0, 'episode_weight': 1.0, 'ddof': 1},
        'rloo': {},
        'reinforce_pp': {},
    })
    c.advantage.normalisation = 'mean_std'  # 'mean_std' | 'mean'
    c.advantage.episode_stats = 'trajectory'  # 'trajectory' (papers' formula) | 'rows' (public code)
    c.advantage.discount = 0.95  # of step returns
    c.advantage.goal_discount = 0.1  # GraphGPO's omega
    c.advantage.distance_offset = 0  # GraphGPO: 0 as its public recipe, 1 as its paper
    c.advantage.history_depth = 3  # HGPO: contexts of the last 1 .. history_depth observations
    c.advantage.invalid_penalty = 0.1  # subtracted from the scores of a row whose reply is not valid
    c.advantage.penalise = 'parsed'  # 'parsed' (format, as published) | 'admissible' (also illegal commands)

    c.coverage = ConfigDict()  # coverage.CoverageConfig, whose docstring explains each
    c.coverage.variant = 'off'  # 'covgpo', or a control: always_on, shuffle, random, shuffle_h, random_h, obs_change
    c.coverage.coverage_scale = 0.3  # lambda_aux
    c.coverage.mode = 'deployed'
    c.coverage.gate_tolerance = 1e-3
    c.coverage.gate_on = 'task'
    c.coverage.levels = ('trajectory', 'step')
    c.coverage.q_fail_scope = 'level'
    c.coverage.coverage_credit = 'trajectory'

    c.sero = ConfigDict()
    c.sero.variant = 'off'  # 'sero', or a control: full_flat, root_only, short_bridge, depth_decay, shuffled
    c.sero.coef = 0.1  # lambda_O
    c.sero.oracle = 'planner'  # of ALFWorld: 'planner' (shortest plan) | 'explorer' (knows only what the episode showed)
    c.sero.restoration = 'copy'  # of the root: 'copy' (snapshot) | 'replay' (reset and the same commands)
    c.sero.roots = 'in_time'  # where the oracle's steps are known (WebShop): 'in_time' only points with so many left | 'all'
    c.sero.root_sampling = 'uniform'  # 'prioritised': more roots for task types that were rare among recent ones
    c.sero.think = True  # targets have an empty think block before the command
    c.sero.nll = 'token_mean'  # 'token_mean' | 'token_sum', of a command
    c.sero.bridge = 3  # commands of short_bridge
    c.sero.decay = 0.9  # delta of depth_decay
    c.sero.match_mass = False  # scale a branch's weights to the sum that sero's have
    c.sero.bank = ''  # file of experiments.oracle_bank: replay its branches, ask no oracle

    c.loss = ConfigDict()  # objective.LossConfig
    c.loss.policy_loss = 'ppo'  # 'ppo' | 'gspo'
    c.loss.clip_low = 0.2
    c.loss.clip_high = 0.2
    c.loss.dual_clip = 3.0
    c.loss.kl_coef = 0.01  # towards the initial policy; 0 saves the reference pass
    c.loss.entropy_coef = 0.001
    c.loss.aggregation = 'token'  # 'token' | 'sequence' | 'trajectory'
    c.loss.count_zero_rows = True
    c.loss.chunk = 64  # reply positions whose logits exist at one time

    c.optimizer = ConfigDict()  # learner.OptimizerConfig
    c.optimizer.name = 'adamw'  # 'adamw' | 'adafactor' (8 bytes a parameter less)
    c.optimizer.first_moment = 'float32'  # of adamw: 'float32' | 'bfloat16'
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 0
    c.optimizer.weight_decay = 0.01
    c.optimizer.max_grad_norm = 1.0
    c.learner = ConfigDict()
    c.learner.minibatch = 256  # rows per optimizer step
    c.learner.micro_batch = 8  # rows on the devices at one time; with packing, sequences
    c.learner.pack_length = 4096  # tokens of a sequence that several rows share; 0 = a sequence for every row
    c.learner.pack_rows = 16  # in one sequence, at most
    c.learner.pack_actions = 0  # reply tokens in one sequence, at most; 0 = a quarter of its length
    c.learner.epochs = 1  # passes over the rows of an update

    c.mesh = ConfigDict()
    c.mesh.data = 1  # copies of the parameters
    c.mesh.fsdp = 0  # devices that share one copy and gather each layer when it is used; 0 = all that are left
    c.mesh.tensor = 1  # devices that share a copy and the work of each layer; divides the key/value heads
    c.mesh.min_memory_gib = 64  # device memory below which the run refuses to start; 0 = do not check

    c.eval = ConfigDict()
    c.eval.every = 5  # updates; also before the first and after the last
    c.eval.splits = ('valid_seen', 'valid_unseen')  # the first one chooses the best checkpoint
    c.eval.temperature = 0.4
    c.eval.plan_bounds = (4, 6)  # expert plans up to the first are short, up to the second medium, others long
    c.eval.max_tasks = 0  # an evenly spaced subset of each split; 0 = all of it
    c.eval.num_envs = 128

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 5  # updates
    c.checkpoint.keep = 2

    c.debug = ConfigDict()
    c.debug.check_invariants = False  # check the exact-zero gate in every update (chexify; slower)
    c.debug.compilation_cache = True  # keep compiled programs under the cache folder for the next start
    return c


def _webshop(c: ConfigDict) -> None:
    """WebShop with Qwen2.5-1.5B-Instruct, as published (HGPO alone plays 30 steps)."""
    c.env.name, c.env.data, c.env.observation = 'webshop', 'WEBSHOP_DATA', 'text'
    c.env.max_steps = 15
    c.eval.splits = ('valid', 'test')
    c.prompt.buckets = (512, 1024, 2048, 3072, 4096)
    c.learner.minibatch, c.learner.pack_length = 64, 8192
    c.advantage.normalisation = 'mean'
    c.advantage.goal_discount = 0.2


def _sokoban(c: ConfigDict) -> None:
    """Sokoban: verl-agent's scale (published with a vision model; here the text grid)."""
    c.env.name, c.env.data, c.env.observation = 'sokoban', 'generated', 'grid'
    c.env.max_steps = 15
    c.env.num_train, c.env.num_valid = 10_000, 256
    c.eval.splits = ('valid', 'test')
    c.prompt.buckets = (256, 512, 1024)
    c.rollout.num_groups = 32
    c.learner.minibatch = 64
    c.advantage.normalisation = 'mean'
    c.advantage.goal_discount = 0.8


def _tiny(c: ConfigDict) -> None:
    """Two CPU cores, minutes: small generated rooms and the packaged policy."""
    c.updates = 24
    c.env.data = 'generated'
    c.env.difficulty = 'tiny'
    c.env.num_train, c.env.num_valid = 600, 120
    c.env.max_steps = 30
    c.env.num_workers = 0
    c.model.path = ''
    c.model.dtype, c.model.remat, c.model.attention_chunk = 'float32', 'none', 0
    c.prompt.wording = 'compact'
    c.prompt.buckets = (96, 128, 160, 192, 224, 256, 320, 448)
    c.prompt.max_action = 16
    c.rollout.num_groups, c.rollout.group_size = 8, 8
    c.rollout.temperature = 0.6  # at 1.0 this policy's errors in copying names drown what it explores
    c.rollout.row_buckets = (8, 32)
    c.rollout.gather_weights = False
    c.rollout.save_trajectories = 1
    c.loss.kl_coef = 0.0  # the start is far from the goal: staying close to it is not wanted
    c.loss.chunk = 16
    c.optimizer.learning_rate, c.optimizer.warmup_steps = 1e-4, 10
    c.learner.minibatch = 256
    c.learner.pack_length = 0  # short rows in eight buckets hardly need padding
    c.learner.micro_batch = 4  # a program's buffers stay below 32 MiB; above, malloc maps fresh pages at every call
    c.mesh.fsdp = 1  # the tiny policy gains nothing from a second device
    c.mesh.min_memory_gib = 0
    c.eval.every = 12
    c.eval.num_envs = 32
    c.checkpoint.every = 1


def _tiny_webshop(c: ConfigDict) -> None:
    c.env.max_steps = 15
    c.prompt.history = 4  # commands alone are shown: pages do not tell which options are chosen
    c.prompt.max_action = 32  # a search
    c.eval.max_tasks = 120


def _tiny_sokoban(c: ConfigDict) -> None:
    c.env.max_steps = 15
    c.env.sokoban.reward = 'success'  # all variants alike
    c.advantage.normalisation = 'mean_std'
    c.rollout.num_groups, c.rollout.temperature = 16, 1.0
    c.env.num_train, c.env.num_valid = 2000, 240
    c.prompt.history = 0  # the grid is the whole state
    c.prompt.buckets = (72, 128)


def _smoke(c: ConfigDict) -> None:
    c.updates = 2
    c.env.num_train, c.env.num_valid = 24, 12
    c.eval.max_tasks = 12
    c.env.max_steps = 6
    c.env.num_workers = 1
    c.rollout.num_groups, c.rollout.group_size = 2, 4
    c.learner.minibatch = 32
    c.loss.kl_coef = 0.01
    c.eval.every = 2
    c.eval.num_envs = 12
    c.debug.check_invariants = True
