// draft_tree: the growth of trees around a decoder's passes. The contract is in __init__.py beside this file.
//
// Knows when a pass is run and over what; refuses to know how it computes.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <vector>

#include "api.h"
#include "kernels/draft_tree/growth.h"
#include "kernels/draft_tree/window.h"

extern "C" int32_t fs_decoder_draft(void* decoder, void* team, const fs_step* step, const fs_store* store, float* hidden, int32_t* argmax, float* logits,
                                    int k, const float* temperature, int32_t* ids, float* shares);

namespace {

using namespace fs::tree;

constexpr int kStride = 64;         // places of one row's output
constexpr int kRowHead = 9;         // words before a row's tokens and pages
constexpr int kRowNumbers = 3;      // numbers before a row's prices
constexpr int kMostPasses = 63;     // that are told of

struct Pick {
    double gain;
    int row;
    int node;
};

struct Tree {
    void* decoder;
    Rules rules;
    std::vector<Row> rows;
    Batch batch;
    std::vector<float> states;    // hidden states of all nodes run in this call
    std::vector<float> features;  // of the next pass
    std::vector<float> logits, shares;
    std::vector<int32_t> argmax, ids;
    std::vector<std::pair<int, int64_t>> passes;  // nodes and nanoseconds

    fs_error read(const int64_t* words, const double* numbers, int count, int page_size);
    fs_error run(void* team, const fs_store& store, const float* given);
    fs_error commit_pass(void* team, const fs_store& store, const float* given);
    fs_error expand(void* team, const fs_store& store, const std::vector<Pick>& picks);
    std::vector<Pick> candidates() const;
    void write(int32_t* out, float* confidence, int64_t* told) const;

    const float* state(int at) const { return states.data() + static_cast<size_t>(at) * static_cast<size_t>(rules.hidden); }
};

fs_error Tree::read(const int64_t* words, const double* numbers, int count, int page_size) {
    rows.resize(static_cast<size_t>(count));
    for (Row& row : rows) {
        row.count = static_cast<int>(words[0]);
        row.kv_len = static_cast<int>(words[1]);
        row.page_count = static_cast<int>(words[2]);
        row.grows = words[3] != 0;
        row.room = static_cast<int>(words[4]);
        row.max_nodes = static_cast<int>(std::min<int64_t>(words[5], kStride - 1));
        row.max_depth = static_cast<int>(words[6]);
        row.price_count = static_cast<int>(words[7]);
        row.chances = reinterpret_cast<const double*>(words[8]);
        row.tokens = words + kRowHead;
        row.pages = row.tokens + row.count;
        words = row.pages + row.page_count;
        row.temperature = static_cast<float>(numbers[0]);
        row.factor = numbers[1];
        row.price = numbers[2];
        row.prices = numbers + kRowNumbers;
        numbers = row.prices + row.price_count;
        row.deepest = std::min(row.room, row.max_depth - 1);
        row.broken = false;
        row.nodes.clear();
        row.paths.clear();
        row.chain.clear();
        row.root_state = -1;
        const int64_t slots = static_cast<int64_t>(row.page_count) * page_size;
        if (row.count < 1 || row.kv_len < 0 || row.room < 0 || static_cast<int64_t>(row.kv_len) + row.count + row.room > slots) return FS_BAD_ROW;
        if (row.grows && row.chances == nullptr) return FS_BAD_ROW;
    }
    return FS_OK;
}

// The batch through the decoder; the best tokens of its scored nodes become their children.
fs_error Tree::run(void* team, const fs_store& store, const float* given) {
    const auto begun = std::chrono::steady_clock::now();
    batch.finish(rows);
    if (batch.score_rows.empty()) {  // decoders want a node to score
        batch.score_rows.push_back(0);
        batch.temperatures.push_back(1.0f);
    }
    const size_t nodes = batch.ids.size(), scored = batch.score_rows.size(), first = states.size() / static_cast<size_t>(rules.hidden);
    const int k = std::min(rules.fan, rules.vocab);
    const auto grow = [](auto& buffer, size_t size) {
        if (buffer.size() < size) buffer.resize(size);
    };
    states.resize(states.size() + nodes * static_cast<size_t>(rules.hidden));
    grow(logits, scored * static_cast<size_t>(rules.vocab));
    grow(argmax, scored);
    grow(ids, scored * static_cast<size_t>(k));
    grow(shares, scored * static_cast<size_t>(k));
    const fs_step step{static_cast<int32_t>(nodes), static_cast<int32_t>(batch.rows.size()), batch.pages, static_cast<int32_t>(scored), batch.ids.data(),
                       batch.positions.data(), batch.slots.data(), batch.words.data(), batch.causal.data(), batch.row_ptr.data(), batch.page_table.data(),
                       batch.kv_lens.data(), batch.score_rows.data(), given};
    float* hidden = states.data() + first * static_cast<size_t>(rules.hidden);
    const int32_t error = fs_decoder_draft(decoder, team, &step, &store, hidden, argmax.data(), logits.data(), k, batch.temperatures.data(), ids.data(), shares.data());
    if (error != FS_OK) return static_cast<fs_error>(error);
    for (size_t i = 0; i < batch.asked.size(); ++i) {
        const auto [index, node] = batch.asked[i];
        Row& row = rows[static_cast<size_t>(index)];
        if (row.broken) continue;
        const float* own = shares.data() + i * static_cast<size_t>(k);
        if (!std::all_of(own, own + k, [](float share) { return std::isfinite(share); }) || !(own[0] > 0.0f)) {
            row.fail();
            continue;
        }
        const int at = static_cast<int>(first) + batch.score_rows[i];
        (node == kRoot ? row.root_state : row.nodes[static_cast<size_t>(node)].state) = at;
        row.add_children(rules, node, ids.data() + i * static_cast<size_t>(k), own, k);
    }
    const std::chrono::nanoseconds took = std::chrono::steady_clock::now() - begun;
    passes.emplace_back(static_cast<int>(nodes), took.count());
    return FS_OK;
}

fs_error Tree::commit_pass(void* team, const fs_store& store, const float* given) {
    batch.clear();
    for (size_t r = 0; r < rows.size(); ++r) {
        const Row& row = rows[r];
        for (int i = 0; i < row.count; ++i) batch.add(static_cast<int32_t>(row.tokens[i]), row.kv_len + i, 0);
        batch.close(row, static_cast<int>(r), row.kv_len, true, store.page_size);
        if (row.grows) batch.score(row, static_cast<int>(r), kRoot, static_cast<int>(batch.ids.size()) - 1);
    }
    return run(team, store, given);
}

// Offered nodes without children, most promising first, `width` of a row at most.
std::vector<Pick> Tree::candidates() const {
    std::vector<Pick> found;
    for (size_t r = 0; r < rows.size(); ++r) {
        const Row& row = rows[r];
        std::vector<Pick> own;
        for (const int node : row.best()) {
            const Node& n = row.nodes[static_cast<size_t>(node)];
            if (n.expanded || n.depth > row.deepest) continue;
            const double gain = row.promise(rules, node);
            if (gain > 0.0) own.push_back({gain, static_cast<int>(r), node});
        }
        std::sort(own.begin(), own.end(), [](const Pick& a, const Pick& b) { return a.gain != b.gain ? a.gain > b.gain : a.node < b.node; });
        if (own.size() > static_cast<size_t>(rules.width)) own.resize(static_cast<size_t>(rules.width));
        found.insert(found.end(), own.begin(), own.end());
    }
    std::stable_sort(found.begin(), found.end(), [](const Pick& a, const Pick& b) { return a.gain > b.gain; });
    return found;
}

fs_error Tree::expand(void* team, const fs_store& store, const std::vector<Pick>& picks) {
    batch.clear();
    features.clear();
    std::vector<int> order;  // rows as they were first picked
    for (const Pick& pick : picks) {
        rows[static_cast<size_t>(pick.row)].nodes[static_cast<size_t>(pick.node)].expanded = true;
        if (std::find(order.begin(), order.end(), pick.row) == order.end()) order.push_back(pick.row);
    }
    for (const int index : order) {
        Row& row = rows[static_cast<size_t>(index)];
        std::vector<int> wanted;
        for (const Pick& pick : picks) {
            if (pick.row == index) wanted.push_back(pick.node);
        }
        const Forest forest(row, wanted);
        const int count = static_cast<int>(forest.order.size());
        if (forest.kept + count > row.room) continue;
        const int start = row.kv_len + row.count + forest.kept, first = batch.row_ptr.back();
        std::vector<int> depths;
        std::vector<int64_t> words;
        for (int i = 0; i < count; ++i) {
            const int node = forest.order[static_cast<size_t>(i)], parent = forest.parents[static_cast<size_t>(i)];
            depths.push_back(parent < 0 ? start : depths[static_cast<size_t>(parent)] + 1);
            words.push_back(static_cast<int64_t>((parent < 0 ? uint64_t{0} : static_cast<uint64_t>(words[static_cast<size_t>(parent)])) | uint64_t{1} << i));
            batch.add(row.nodes[static_cast<size_t>(node)].token, depths.back(), words.back());
            if (rules.features) features.insert(features.end(), state(row.state_above(node)), state(row.state_above(node)) + rules.hidden);
        }
        batch.close(row, index, start, false, store.page_size);
        for (int i = 0; i < count; ++i) {
            const int node = forest.order[static_cast<size_t>(i)];
            if (std::find(wanted.begin(), wanted.end(), node) != wanted.end()) batch.score(row, index, node, first + i);
        }
        row.chain.resize(static_cast<size_t>(forest.kept));
        for (int i = 0; i < count && forest.parents[static_cast<size_t>(i)] == i - 1; ++i) row.chain.push_back(forest.order[static_cast<size_t>(i)]);
    }
    return batch.ids.empty() ? FS_OK : run(team, store, rules.features ? features.data() : nullptr);
}

void Tree::write(int32_t* out, float* confidence, int64_t* told) const {
    for (const Row& row : rows) {
        const std::vector<int> chosen = row.best();
        std::vector<int> place(row.nodes.size(), kRoot);
        for (size_t i = 0; i < chosen.size(); ++i) place[static_cast<size_t>(chosen[i])] = static_cast<int>(i);
        int32_t *tokens = out + 3, *parents = tokens + kStride, *ranks = parents + kStride, *chain = ranks + kStride;
        for (size_t i = 0; i < chosen.size(); ++i) {
            const Node& node = row.nodes[static_cast<size_t>(chosen[i])];
            tokens[i] = node.token;
            parents[i] = node.parent == kRoot ? kRoot : place[static_cast<size_t>(node.parent)];
            ranks[i] = node.rank;
            confidence[i] = node.confidence;
        }
        for (size_t i = 0; i < row.chain.size(); ++i) chain[i] = row.nodes[static_cast<size_t>(row.chain[i])].token;
        out[0] = row.broken;
        out[1] = static_cast<int32_t>(chosen.size());
        out[2] = static_cast<int32_t>(row.chain.size());
        out += 3 + 4 * kStride;
        confidence += kStride;
    }
    const size_t count = std::min(passes.size(), static_cast<size_t>(kMostPasses));
    told[0] = static_cast<int64_t>(count);
    for (size_t i = 0; i < count; ++i) told[1 + 2 * i] = passes[i].first, told[2 + 2 * i] = passes[i].second;
}

// How many of the picks one pass should take: the best sum less its cost; 0 = no pass.
size_t worthwhile(const std::vector<Pick>& picks, const double* costs, int cost_count) {
    double best = 0.0, total = 0.0;
    size_t found = 0;
    for (size_t count = 1; count <= picks.size(); ++count) {
        total += picks[count - 1].gain;
        const double net = total - costs[std::min<int>(std::bit_width(count - 1), cost_count - 1)];
        if (net > best) best = net, found = count;
    }
    return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// The decoder must outlive it. `features`: its nodes come with features as wide as its states. `names`: the token of each score column, or null.
void* fs_tree_create(void* decoder, int hidden, int vocab, int features, const int32_t* names, const double* edges, int edge_count,
                     const int32_t* depth_cells, int cell_count, int ranks, int fan, int width) {
    auto* tree = new Tree{decoder, {fan, width, hidden, vocab, ranks, features != 0, {}, {}, {}}, {}, {}, {}, {}, {}, {}, {}, {}, {}};
    tree->rules.edges.assign(edges, edges + edge_count);
    tree->rules.depth_cells.assign(depth_cells, depth_cells + cell_count);
    if (names != nullptr) tree->rules.names.assign(names, names + vocab);
    return tree;
}
void fs_tree_destroy(void* tree) { delete static_cast<Tree*>(tree); }

// `words` and `numbers`: rows as Tree::read takes them. `features` [N, hidden] of all committed tokens or null. Out, per row: whether it is broken,
// nodes, length of the chain, then 64 places each for tokens, parents, ranks and the chain's tokens; 64 shares; and how many passes there were,
// each with its nodes and nanoseconds (64 pairs at most).
int32_t fs_tree_grow(void* tree_, void* team, const fs_store* store, const int64_t* words, const double* numbers, int count, const float* features,
                     const double* costs, int cost_count, int32_t* out, float* confidence, int64_t* passes) {
    auto& tree = *static_cast<Tree*>(tree_);
    tree.states.clear();
    tree.passes.clear();
    if (store->page_size < 1 || cost_count < 1) return FS_BAD_SHAPE;
    if (tree.rules.features != (features != nullptr)) return FS_BAD_FEATURES;
    fs_error error = tree.read(words, numbers, count, store->page_size);
    if (error == FS_OK) error = tree.commit_pass(team, *store, features);
    while (error == FS_OK) {
        std::vector<Pick> picks = tree.candidates();
        picks.resize(worthwhile(picks, costs, cost_count));
        if (picks.empty()) break;
        error = tree.expand(team, *store, picks);
    }
    if (error == FS_OK) tree.write(out, confidence, passes);
    return error;
}

}  // extern "C"
#pragma GCC visibility pop
