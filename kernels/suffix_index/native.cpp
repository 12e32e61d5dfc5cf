// suffix_index: where have the last tokens of a growing list occurred before? The contract is in __init__.py beside this file; the
// reference is reference.py, and every answer here is the one it gives.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kOrders = 4;
constexpr int kOrder[kOrders] = {8, 4, 2, 1};    // context lengths that are indexed, longest first
constexpr int kLengths[] = {12, 16, 24, 32};     // longer matches are told apart at these lengths
constexpr int kLongest = 32;
constexpr int kEnough = 4;                       // so many long matches, and shorter ones are not looked for
constexpr int kMostMatches = 64;                 // of one list in one question

struct Match {
    int32_t position;  // of the continuation's first token
    int32_t length;    // of the match before it
};

uint32_t hash_of(const int32_t* context, int k) {
    uint64_t h = static_cast<uint64_t>(k);
    for (int i = 0; i < k; ++i) h = (h ^ static_cast<uint32_t>(context[i])) * 0x9E3779B97F4A7C15ull, h ^= h >> 29;
    return static_cast<uint32_t>(h >> 32);
}

bool same(const int32_t* a, const int32_t* b, int k) { return std::memcmp(a, b, static_cast<size_t>(k) * sizeof(int32_t)) == 0; }

// Newest position after each context of k tokens: open addressing over (hash, position + 1), 0 = empty. The tokens themselves decide
// whether a slot is the context's, so a hash that collides changes nothing.
struct Heads {
    std::vector<uint64_t> slots;
    size_t used = 0;

    size_t find(const std::vector<int32_t>& tokens, const int32_t* context, int k, uint32_t hash) const {
        const size_t mask = slots.size() - 1;
        for (size_t at = hash & mask;; at = (at + 1) & mask) {
            const uint64_t slot = slots[at];
            if (slot == 0) return at;
            if (static_cast<uint32_t>(slot >> 32) == hash && same(tokens.data() + position(slot) - k, context, k)) return at;
        }
    }

    static int32_t position(uint64_t slot) { return static_cast<int32_t>(static_cast<uint32_t>(slot)) - 1; }
    static uint64_t slot(uint32_t hash, int32_t position) { return static_cast<uint64_t>(hash) << 32 | static_cast<uint32_t>(position + 1); }

    void grow() {
        std::vector<uint64_t> old(std::max<size_t>(64, slots.size() * 2));
        old.swap(slots);
        const size_t mask = slots.size() - 1;
        for (const uint64_t entry : old) {
            if (entry == 0) continue;
            size_t at = static_cast<uint32_t>(entry >> 32) & mask;
            while (slots[at] != 0) at = (at + 1) & mask;
            slots[at] = entry;
        }
    }
};

class Index {
public:
    template <class Token>
    void extend(const Token* fresh, int count) {
        const auto first = static_cast<int32_t>(tokens_.size());
        tokens_.insert(tokens_.end(), fresh, fresh + count);
        for (int o = 0; o < kOrders; ++o) {
            links_[o].resize(tokens_.size(), -1);
            for (int32_t p = std::max(first, static_cast<int32_t>(kOrder[o])); p < first + count; ++p) add(o, p);
        }
    }

    // Asks memory for what extending by these and finding the new end will touch. After a pass of the model nothing of it is in a cache.
    void expect(const int32_t* fresh, int count) const {
        int32_t end[kOrder[0]];
        const int size = std::min<int>(kOrder[0], static_cast<int>(tokens_.size()) + count), own = std::max(0, size - count);
        std::copy(tokens_.end() - own, tokens_.end(), end);
        std::copy(fresh + count - (size - own), fresh + count, end + own);
        for (int o = 0; o < kOrders; ++o) {
            const auto& slots = heads_[o].slots;
            if (size < kOrder[o] || slots.empty()) continue;
            __builtin_prefetch(&slots[hash_of(end + size - kOrder[o], kOrder[o]) & (slots.size() - 1)], 1);
            __builtin_prefetch(links_[o].data() + links_[o].size(), 1);
        }
    }

    // Up to `limit` occurrences of the end of `tail`, as reference.py lists them. Returns how many.
    int matches(const int32_t* tail, int size, int limit, int shortest, Match* out) const {
        int found = 0, longer = 0;
        for (int o = 0; o < kOrders; ++o) {
            const int k = kOrder[o];
            if (size < k) {  // the longer order lists nothing, but a shorter one may still match all of the tail
                longer = k;
                continue;
            }
            if (longer > 0 && longer <= shortest) break;  // this order and the ones after it only tell shorter matches
            int32_t p = newest(o, tail + size - k);
            for (int steps = o == 0 ? (limit + 1) / 2 : limit; p >= 0 && steps > 0; --steps, p = links_[o][static_cast<size_t>(p)]) {
                const int length = length_of(p, tail, size, k, longer);
                if (length < shortest) continue;
                out[found++] = {p, length};
                if (found == limit) return found;
            }
            longer = k;
            if (found >= kEnough && k >= kEnough) break;  // enough long matches: shorter ones would only add noise
        }
        return found;
    }

    const std::vector<int32_t>& tokens() const { return tokens_; }

private:
    void add(int o, int32_t p) {
        Heads& heads = heads_[o];
        if (2 * (heads.used + 1) > heads.slots.size()) heads.grow();
        const int k = kOrder[o];
        const int32_t* context = tokens_.data() + p - k;
        const uint32_t hash = hash_of(context, k);
        uint64_t& slot = heads.slots[heads.find(tokens_, context, k, hash)];
        if (slot == 0) {
            ++heads.used;
        } else {
            links_[o][static_cast<size_t>(p)] = Heads::position(slot);
        }
        slot = Heads::slot(hash, p);
    }

    int32_t newest(int o, const int32_t* context) const {
        const Heads& heads = heads_[o];
        if (heads.slots.empty()) return -1;
        const uint64_t slot = heads.slots[heads.find(tokens_, context, kOrder[o], hash_of(context, kOrder[o]))];
        return slot == 0 ? -1 : Heads::position(slot);
    }

    // Match length before p, at least k; 0 when the next longer order lists the position already.
    int length_of(int32_t p, const int32_t* tail, int size, int k, int longer) const {
        const int32_t* before = tokens_.data() + p;
        int length = k;
        if (k == kOrder[0]) {
            for (const int longest : kLengths) {
                if (longest > size || longest > p || !same(before - longest, tail + size - longest, longest)) break;
                length = longest;
            }
            return length;
        }
        while (length < longer && length < size && length < p && before[-length - 1] == tail[size - length - 1]) ++length;
        return length == longer ? 0 : length;
    }

    std::vector<int32_t> tokens_;
    Heads heads_[kOrders];
    std::vector<int32_t> links_[kOrders];  // the position before with the same context, -1 = none
};

// The vote of all matches on the next token: groups in the order of their first voter.
class Vote {
public:
    void add(const Index& index, const Match* found, int count, double trust) {
        for (int i = 0; i < count; ++i) {
            const int32_t token = index.tokens()[static_cast<size_t>(found[i].position)];
            if (token < 0) continue;  // the end of a text
            int g = 0;
            while (g < count_ && groups_[g].token != token) ++g;
            if (g == count_) groups_[count_++] = {token, 0, 0.0};
            groups_[g].length = std::max(groups_[g].length, found[i].length);
            groups_[g].weight += trust * static_cast<double>(uint64_t{1} << (2 * std::min(found[i].length, kHeaviest)));
        }
    }

    // Score of what most of them speak for: that of the longest match behind it, times its share.
    double score(const double* scores, int lengths) const {
        double total = 0.0;
        const Group* best = nullptr;
        for (int g = 0; g < count_; ++g) {
            total += groups_[g].weight;
            if (best == nullptr || groups_[g].weight > best->weight) best = &groups_[g];
        }
        return best == nullptr ? 0.0 : scores[std::min(best->length, lengths - 1)] * (best->weight / total);
    }

private:
    static constexpr int kHeaviest = 8;  // a match of n tokens weighs 4^n, and longer ones no more

    struct Group {
        int32_t token;
        int length;
        double weight;
    };

    Group groups_[3 * kMostMatches];
    int count_ = 0;
};

// A sequence that looks are about.
struct Row {
    Index* texts[3];  // its own and two others, null = none
    int shortest;
    double least;  // score, in millionths
};

struct Looker {
    int limit;
    double trust;
    std::vector<double> scores;
    std::vector<Row> rows;
};

// Where the end of the first list occurred in all three; `out` has room for three times kMostMatches.
int find(const Looker& looker, const Index* const texts[3], int shortest, Match* out, int counts[3]) {
    const Index* own = texts[0];
    const int size = std::min<int>(kLongest, static_cast<int>(own->tokens().size()));
    const int32_t* tail = own->tokens().data() + own->tokens().size() - static_cast<size_t>(size);
    int found = 0;
    for (int i = 0; i < 3; ++i) {
        const Index* text = texts[i];
        counts[i] = text == nullptr || shortest > kLongest ? 0 : text->matches(tail, size, looker.limit, shortest, out + found);
        found += counts[i];
    }
    return found;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* fs_suffix_create() { return new Index(); }
void fs_suffix_destroy(void* index) { delete static_cast<Index*>(index); }
void fs_suffix_extend(void* index, const int32_t* tokens, int count) { static_cast<Index*>(index)->extend(tokens, count); }

// Up to `limit` (at most 64) matches of the end of `tail`: positions and lengths.
int fs_suffix_matches(const void* index, const int32_t* tail, int size, int limit, int shortest, int32_t* positions, int32_t* lengths) {
    Match found[kMostMatches];
    const int count = static_cast<const Index*>(index)->matches(tail, size, std::min(limit, kMostMatches), shortest, found);
    for (int i = 0; i < count; ++i) positions[i] = found[i].position, lengths[i] = found[i].length;
    return count;
}

void* fs_suffix_looker(int limit, double trust, const double* scores, int lengths) {
    return new Looker{std::min(limit, kMostMatches), trust, std::vector<double>(scores, scores + lengths), {}};
}
void fs_suffix_looker_destroy(void* looker) { delete static_cast<Looker*>(looker); }

// Looks are about these from now on. Each row: addresses of its own and two other lists (0 = none), the shortest match that counts, the
// least score in millionths.
void fs_suffix_watch(void* looker, const int64_t* rows, int count) {
    auto& kept = static_cast<Looker*>(looker)->rows;
    kept.clear();
    for (const int64_t* row = rows; row < rows + 5 * count; row += 5) {
        const auto text = [row](int i) { return reinterpret_cast<Index*>(row[i]); };
        kept.push_back({{text(0), text(1), text(2)}, static_cast<int>(row[3]), static_cast<double>(row[4])});
    }
}

// `words`: for each row, how many tokens are to be appended to its own list, and those. The rows that score above 0 and enough are listed in
// the buffer's first words. Returns how many.
int fs_suffix_look(const void* looker_, int32_t* words) {
    const auto& looker = *static_cast<const Looker*>(looker_);
    const int32_t* next_word = words;
    for (const Row& row : looker.rows) {
        for (size_t line = 0; line < sizeof(Index); line += 64) __builtin_prefetch(reinterpret_cast<const char*>(row.texts[0]) + line);
    }
    for (const Row& row : looker.rows) {
        row.texts[0]->expect(next_word + 1, *next_word);
        next_word += 1 + *next_word;
    }
    next_word = words;
    int hopeful = 0;
    for (size_t r = 0; r < looker.rows.size(); ++r) {
        const Row& row = looker.rows[r];
        const int fresh = *next_word++;
        row.texts[0]->extend(next_word, fresh);
        next_word += fresh;
        Match found[3 * kMostMatches];
        int counts[3];
        if (find(looker, row.texts, row.shortest, found, counts) == 0) continue;
        Vote vote;
        const Match* next = found;
        for (int i = 0; i < 3; next += counts[i++]) {
            if (counts[i] > 0) vote.add(*row.texts[i], next, counts[i], i == 0 ? 1.0 : looker.trust);
        }
        const double score = vote.score(looker.scores.data(), static_cast<int>(looker.scores.size()));
        // A row takes a word at least, so nothing unread is written over.
        if (score > 0.0 && score * 1e6 >= row.least) words[hopeful++] = static_cast<int32_t>(r);
    }
    return hopeful;
}

// The matches of one row (own and two other lists): triples of which list, position and length. Returns how many.
int fs_suffix_find(const void* looker, const void* own, const void* newer, const void* older, int shortest, int32_t* out) {
    const Index* const texts[3] = {static_cast<const Index*>(own), static_cast<const Index*>(newer), static_cast<const Index*>(older)};
    Match found[3 * kMostMatches];
    int counts[3];
    const int total = find(*static_cast<const Looker*>(looker), texts, shortest, found, counts);
    for (int i = 0, at = 0; i < 3; ++i) {
        for (int n = 0; n < counts[i]; ++n, ++at) out[3 * at] = i, out[3 * at + 1] = found[at].position, out[3 * at + 2] = found[at].length;
    }
    return total;
}

}  // extern "C"
#pragma GCC visibility pop
