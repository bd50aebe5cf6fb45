"""Environments whose observations, rewards and Q-values are known beforehand."""

import flax.struct
import jax
import jax.numpy as jnp
from gymnax.environments import environment
from gymnax.environments import spaces


@flax.struct.dataclass
class Count:
    """How many steps the episode has had."""

    time: int
    length: int = 0


@flax.struct.dataclass
class Limit:
    """When an episode of Counter is cut, and when it ends by itself."""

    max_steps_in_episode: int = 1_000_000
    terminate_at: int = 1_000_000


class Counter(environment.Environment):
    """Observes how many steps the episode has had, plus 1, and pays as much; actions do nothing."""

    def __init__(self, num_actions=2):
        super().__init__()
        self.actions = num_actions

    @property
    def default_params(self):
        return Limit()

    def reset_env(self, key, params):
        return jnp.ones(1), Count(time=jnp.int32(0))

    def step_env(self, key, state, action, params):
        state = Count(time=state.time + 1)
        obs = jnp.ones(1) * (1.0 + state.time)
        return obs, state, 1.0 * state.time, state.time >= params.terminate_at, {}

    def observation_space(self, params):
        return spaces.Box(0, 1e9, (1,))

    def action_space(self, params=None):
        return spaces.Discrete(self.actions)


@flax.struct.dataclass
class ProbeState:
    """Where the episode is."""

    time: int
    place: float


@flax.struct.dataclass
class ProbeParams:
    """Which probe, and after how many steps time cuts its episodes."""

    kind: int = 0
    max_steps_in_episode: int = 1_000_000


class Probe(environment.Environment):
    """Five of them, by `kind`: an observation is the place alone.

    Episodes end after one step, unless said otherwise.
    0: constant reward 1.
    1: the place is -1 or 1, and so is the reward.
    2: two steps, at 0 and 1, of which the second pays 1.
    3: action 1 pays 1 and action 0 pays -1.
    4: pays 1 for ever, cut by time after 3 steps.
    """

    @property
    def default_params(self):
        return ProbeParams()

    def reset_env(self, key, params):
        place = jnp.where(params.kind == 1, 2.0 * jax.random.bernoulli(key) - 1, 0.0)
        return place[None], ProbeState(time=jnp.int32(0), place=place)

    def step_env(self, key, state, action, params):
        second = jnp.where(params.kind == 2, state.place, 1.0)
        reward = jnp.stack([1.0, state.place, state.place, 2.0 * action - 1, 1.0])[params.kind]
        terminated = (params.kind < 4) & (second == 1)
        place = jnp.where(params.kind == 2, 1.0, state.place)
        return place[None], ProbeState(time=state.time + 1, place=place), reward, terminated, {}

    def observation_space(self, params):
        return spaces.Box(-1, 1, (1,))

    def action_space(self, params=None):
        return spaces.Discrete(2)


# kind, place, Q of both actions at gamma 0.5
KNOWN = [
    (0, 0.0, (1, 1)),
    (1, -1.0, (-1, -1)),
    (1, 1.0, (1, 1)),
    (2, 0.0, (0.5, 0.5)),
    (2, 1.0, (1, 1)),
    (3, 0.0, (-1, 1)),
    (4, 0.0, (2, 2)),  # 1 + 0.5 x 2 = 2
]
