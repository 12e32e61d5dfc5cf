// What a pass of draft_tree runs, and which keys lie in a row's window. Knows nodes and slots; refuses to know chances.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "kernels/draft_tree/growth.h"

namespace fs::tree {

// One pass in the order of the decoder's inputs.
struct Batch {
    std::vector<int32_t> ids, positions, slots, row_ptr, page_table, kv_lens, score_rows;
    std::vector<int64_t> words;
    std::vector<uint8_t> causal;
    std::vector<std::pair<int, int>> asked;  // of each scored node: row, node
    std::vector<int> rows;
    std::vector<float> temperatures;
    int pages = 0;

    void clear() {
        for (auto* ints : {&ids, &positions, &slots, &row_ptr, &page_table, &kv_lens, &score_rows}) ints->clear();
        words.clear();
        causal.clear();
        asked.clear();
        rows.clear();
        temperatures.clear();
        row_ptr.push_back(0);
        pages = 0;
    }

    void add(int32_t token, int position, int64_t word) {
        ids.push_back(token);
        positions.push_back(position);
        words.push_back(word);
    }

    // Closes a row whose nodes lie at logical indices kv_len, kv_len + 1, ...
    void close(const Row& row, int index, int kv_len, bool is_causal, int page_size) {
        const int first = row_ptr.back(), count = static_cast<int>(ids.size()) - first;
        for (int at = kv_len; at < kv_len + count; ++at) slots.push_back(static_cast<int32_t>(row.pages[at / page_size] * page_size + at % page_size));
        rows.push_back(index);
        row_ptr.push_back(first + count);
        kv_lens.push_back(kv_len);
        causal.push_back(is_causal);
        pages = std::max(pages, (kv_len + count + page_size - 1) / page_size);
    }

    void score(const Row& row, int index, int node, int at) {
        score_rows.push_back(at);
        asked.emplace_back(index, node);
        temperatures.push_back(row.temperature);
    }

    void finish(const std::vector<Row>& all) {
        page_table.assign(rows.size() * static_cast<size_t>(pages), 0);
        for (size_t r = 0; r < rows.size(); ++r) {
            const Row& row = all[static_cast<size_t>(rows[r])];
            for (int p = 0; p < std::min(pages, row.page_count); ++p) page_table[r * static_cast<size_t>(pages) + static_cast<size_t>(p)] = static_cast<int32_t>(row.pages[p]);
        }
    }
};

// Which nodes of a row a pass runs so that `wanted` are scored: `order` parents first, behind the first `kept` nodes of the chain.
struct Forest {
    int kept = 0;
    std::vector<int> order, parents;  // parents within the order, -1 = what is kept

    Forest(const Row& row, const std::vector<int>& wanted) {
        std::vector<int> needed;
        std::vector<bool> seen(row.nodes.size(), false), target(row.nodes.size(), false), held(row.nodes.size(), false);
        for (const int node : wanted) target[static_cast<size_t>(node)] = true;
        for (const int node : wanted) {
            for (int step = node; step != kRoot && !seen[static_cast<size_t>(step)]; step = row.nodes[static_cast<size_t>(step)].parent) {
                seen[static_cast<size_t>(step)] = true;
                needed.push_back(step);
            }
        }
        for (const int node : row.chain) {
            if (target[static_cast<size_t>(node)] || !std::all_of(wanted.begin(), wanted.end(), [&](int w) { return row.is_above(node, w); })) break;
            held[static_cast<size_t>(node)] = true;
            ++kept;
        }
        needed.erase(std::remove_if(needed.begin(), needed.end(), [&](int node) { return held[static_cast<size_t>(node)]; }), needed.end());
        depth_first(row, needed);
    }

  private:
    // The likeliest path ahead, so that the keys of what is accepted tend to lie in place.
    void depth_first(const Row& row, std::vector<int>& needed) {
        std::sort(needed.begin(), needed.end(), [&](int a, int b) {  // the best last: it is taken first
            const double fa = row.nodes[static_cast<size_t>(a)].path, fb = row.nodes[static_cast<size_t>(b)].path;
            return fa != fb ? fa < fb : a > b;
        });
        std::vector<int> place(row.nodes.size(), -1);
        std::vector<bool> inside(row.nodes.size(), false);
        for (const int node : needed) inside[static_cast<size_t>(node)] = true;
        const auto top = [&](int node) {
            const int parent = row.nodes[static_cast<size_t>(node)].parent;
            return parent == kRoot || !inside[static_cast<size_t>(parent)] ? kRoot : parent;
        };
        std::vector<int> stack;
        const auto push_below = [&](int parent) {
            for (const int node : needed) {
                if (top(node) == parent) stack.push_back(node);
            }
        };
        push_below(kRoot);
        while (!stack.empty()) {
            const int node = stack.back();
            stack.pop_back();
            place[static_cast<size_t>(node)] = static_cast<int>(order.size());
            const int parent = top(node);
            parents.push_back(parent == kRoot ? -1 : place[static_cast<size_t>(parent)]);
            order.push_back(node);
            push_below(node);
        }
    }
};

}  // namespace fs::tree
