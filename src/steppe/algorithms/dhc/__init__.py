"""DHC: recurrent Q-learning of many agents that communicate."""
