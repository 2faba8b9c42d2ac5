"""Step 3: answers, their rewards and advantages, and the updates of the policy on them."""
