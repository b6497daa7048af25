"""Train an ensemble: members learn from their own samples, vote on actions, and report their disagreement.

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
        experiences = {name: environment.generate_experiences(agent, 8) for name, agent in learner.agents.items()}
        metrics = learner.train_agents(experiences)
        disagreement = metrics["member-0"]["disagreement"]
        mean_length = sum(len(steps) for steps in experiences.values()) / 24
        print(f"round {number}: {mean_length:.1f} steps per episode, members disagree on {disagreement:.0%} of them")
    name, best = learner.get_best_agent()
    print(f"best member: {name}, {best.evaluate_policy(10)['return_mean']:.1f}")
    print(f"the ensemble chooses {learner.ensemble_predict(np.zeros(4, np.float32))} in the center")
