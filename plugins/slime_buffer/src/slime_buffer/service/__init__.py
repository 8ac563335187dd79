"""The rollout buffer service: a ledger behind HTTP, for generators and trainers that live elsewhere.

    trainer -> ask -> open groups -> work (leased) -> trajectories -> finished groups -> batches (leased) -> ack

`models` bodies · `store` groups, leases, what waits for its siblings · `buffer_service` both store and ledger ·
`app` routes · `guard` token and limits, before any route · `serve` folder, token file, socket, signals.
"""
