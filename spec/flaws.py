"""What may be wrong with what a drafter or the speculator offers. Knows proposals, trees and budgets; refuses to know who made them."""

from __future__ import annotations

from spec.drafter import Budget
from spec.tree import ROOT, DraftTree, Proposal


def find_flaw(proposal: Proposal, budget: Budget, vocab_size: int) -> str | None:
    """What is wrong with a proposal, or None."""
    ids, parents = proposal.token_ids, proposal.parents
    count = len(ids)
    if count > budget.max_nodes:
        return f"{count} nodes were drafted, {budget.max_nodes} allowed"
    if not count == len(parents) == len(proposal.confidence) == len(proposal.ranks):
        return "token_ids, parents, confidence and ranks differ in length"
    if proposal.draft_probs is not None and len(proposal.draft_probs) != count:
        return "draft_probs and token_ids differ in length"
    if min(ids) < 0 or max(ids) >= vocab_size:
        return f"a token id is outside the vocabulary of {vocab_size}"
    if not all(0.0 <= score <= 1.0 for score in proposal.confidence):  # NaN fails every comparison
        return "a confidence is not between 0 and 1"
    if min(proposal.ranks) < 0:
        return "a rank is negative"
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            return f"node {node} has parent {parent}; a parent must come before its child"
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    if max(depths) > budget.max_depth:
        return f"a node has depth {max(depths)}, {budget.max_depth} allowed"
    return None


def too_large(tree: DraftTree, budget: Budget) -> bool:
    return len(tree) > budget.max_nodes or max(tree.depths, default=0) > budget.max_depth
