// One row of draft_tree: its candidates, their chances and prices. The rule is in __init__.py beside this file.
//
// Everything is float64 in the order the Python growth has it, so that both choose the same nodes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fs::tree {

constexpr int kRoot = -1;

struct Node {
    int32_t token;
    int parent;  // index of a node or kRoot
    int depth;
    int rank;
    float confidence;
    double path;
    bool expanded = false;
    int state = -1;  // row of the states, once it was scored
};

struct Rules {
    int fan, width, hidden, vocab, ranks;
    bool features;
    std::vector<double> edges;
    std::vector<int32_t> depth_cells;
    std::vector<int32_t> names;

    size_t columns() const { return edges.size() + 2; }
    // First column of a node's chances.
    size_t cell(int depth, int rank) const {
        const auto at = std::min(static_cast<size_t>(depth), depth_cells.size() - 1);
        return (static_cast<size_t>(depth_cells[at]) * static_cast<size_t>(ranks) + static_cast<size_t>(std::min(rank, ranks - 1))) * columns();
    }
};

// One sequence: what it may draft, and what it has.
struct Row {
    const int64_t* tokens;
    const int64_t* pages;
    int count, kv_len, page_count, room, max_nodes, max_depth, deepest;
    bool grows, broken = false;
    double factor, price;
    float temperature;
    const double* prices;
    int price_count;
    const double* chances;

    std::vector<Node> nodes;
    std::vector<double> paths;  // minus the path chances of all nodes, ascending
    std::vector<int> chain;     // nodes whose keys lie right after the root's
    int root_state = -1;

    double chance(const Rules& rules, int depth, int rank, size_t column) const {
        return std::min(1.0, chances[rules.cell(depth, rank) + column] * factor);
    }
    double above(int parent) const { return parent == kRoot ? 1.0 : nodes[static_cast<size_t>(parent)].path; }
    int depth_below(int parent) const { return parent == kRoot ? 1 : nodes[static_cast<size_t>(parent)].depth + 1; }
    int state_above(int node) const {
        const int parent = nodes[static_cast<size_t>(node)].parent;
        return parent == kRoot ? root_state : nodes[static_cast<size_t>(parent)].state;
    }

    void add_children(const Rules& rules, int parent, const int32_t* ids, const float* shares, int k) {
        const int depth = depth_below(parent);
        if (parent != kRoot) nodes[static_cast<size_t>(parent)].expanded = true;
        if (depth > max_depth) return;
        const double before = above(parent);
        for (int rank = 0; rank < k && shares[rank] > 0.0f; ++rank) {
            const double share = std::min(1.0, static_cast<double>(shares[rank]));
            const auto bin = static_cast<size_t>(std::upper_bound(rules.edges.begin(), rules.edges.end(), share) - rules.edges.begin());
            const double path = before * chance(rules, depth, rank, 1 + bin);
            if (!(path > 0.0 && path >= price)) continue;
            const int32_t token = rules.names.empty() ? ids[rank] : rules.names[static_cast<size_t>(ids[rank])];
            nodes.push_back({token, parent, depth, rank, static_cast<float>(share), path});
            paths.insert(std::upper_bound(paths.begin(), paths.end(), -path), -path);
        }
    }

    std::vector<int> best() const {
        std::vector<int> order(nodes.size());
        for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return nodes[static_cast<size_t>(a)].path > nodes[static_cast<size_t>(b)].path; });
        if (order.size() > static_cast<size_t>(max_nodes)) order.resize(static_cast<size_t>(max_nodes));
        return order;
    }

    double promise(const Rules& rules, int parent) const {
        const int depth = depth_below(parent);
        if (depth > deepest + 1) return 0.0;
        const double before = above(parent);
        double gain = 0.0;
        for (int rank = 0; rank < rules.fan; ++rank) {
            const double worth = before * chance(rules, depth, rank, 0);
            double least = price;
            if (price_count > 0) {  // it would come after the nodes that are better
                const auto better = static_cast<int>(std::upper_bound(paths.begin(), paths.end(), -worth) - paths.begin());
                least = std::max(least, prices[std::min(better + rank, price_count - 1)]);
            }
            if (worth <= least) break;
            gain += worth - least;
        }
        return gain;
    }

    void fail() {
        broken = true;
        nodes.clear();
        paths.clear();
        chain.clear();
    }

    bool is_above(int ancestor, int node) const {
        int step = nodes[static_cast<size_t>(node)].parent;
        const int depth = nodes[static_cast<size_t>(ancestor)].depth;
        while (step != kRoot && nodes[static_cast<size_t>(step)].depth > depth) step = nodes[static_cast<size_t>(step)].parent;
        return step == ancestor;
    }
};

}  // namespace fs::tree
