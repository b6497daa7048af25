"""An ensemble: members learn from their own draws of what they saw, vote, and tell how far apart they are.

python ensemble.py [ROUNDS]
"""

import sys

import numpy as np

from steppe import DistributedAgent, DistributedEnvironment, MultiAgentLearner

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 20

environment = DistributedEnvironment("CartPole-v1", num_workers=1, envs_per_worker=8, seed=0)
learner = MultiAgentLearner({f"member-{k}": DistributedAgent("ppo", 0.003, seed=k) for k in range(3)})
learner.bind(environment)

with environment:
    for number in range(rounds):
        seen = {name: environment.generate_experiences(agent, 8) for name, agent in learner.agents.items()}
        metrics = learner.train_agents(seen)
        split = metrics["member-0"]["disagreement"]
        returns = sum(len(steps) for steps in seen.values()) / 24
        print(f"round {number}: {returns:.1f} steps an episode, members disagree on {split:.0%} of them")
    name, best = learner.get_best_agent()
    print(f"best member: {name}, {best.evaluate_policy(10)['return_mean']:.1f}")
    print(f"all together choose {learner.ensemble_predict(np.zeros(4, np.float32))} in the middle")
