"""The only rollout loop: collect groups, reward and filter them."""
