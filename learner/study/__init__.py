"""The experiments: simulated users who teach a running Riacho through its HTTP API, measurements and plots.

Boundary: a client of the service. It starts it as a process and speaks HTTP; of Riacho it imports `learner.tiny`
and the shipped model's path only. `agent_offline` and `skip_observation` alone use the learner's own classes: they
compare it with variants that the product does not have.
"""
