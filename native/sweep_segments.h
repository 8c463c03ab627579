// How a sweep is cut into segments of heads, and what these add to: sums of columns, and pictures.
//
// A unit of work is a segment of a head's tiles. Tiles add to columns and pictures in order; those of segments are put
// together in the second half, in order as well. Segments follow from the call's sizes, so no thread changes a bit.
#pragma once

#include "rows.h"

namespace regard {
namespace REGARD_ISA {

struct SweepCut {
    const regard_sweep &s;
    const regard_call &c;
    int64_t heads, tiles;           // heads of all batch rows; tiles of queries of each
    int64_t per_segment, segments;  // tiles of a segment; segments of a head
    int64_t rows, cells;            // of a picture

    static constexpr int64_t UNITS = 64;  // where there are few heads: enough for many threads, with little to merge

    explicit SweepCut(const regard_sweep &sweep)
        : s(sweep), c(sweep.call), heads(c.batch * c.heads), tiles(c.by_query.rows) {
        const int64_t wanted = heads && heads < UNITS ? (UNITS + heads - 1) / heads : 1;
        per_segment = tiles > wanted ? (tiles + wanted - 1) / wanted : 1;
        segments = (tiles + per_segment - 1) / per_segment;
        rows = s.mean ? (c.queries + s.cell - 1) / s.cell : 0;
        cells = s.mean ? (c.keys + s.cell - 1) / s.cell : 0;
    }

    int64_t units(int half) const { return half ? heads : heads * segments; }
    // Sums of columns, and two rows of cells that others may add to as well: their sums, and their largest.
    int64_t columns_bytes() const { return up(c.keys * 8, 64); }
    int64_t edge_bytes() const { return up(cells * 8, 64); }
    int64_t unit_bytes() const { return columns_bytes() + 4 * edge_bytes(); }
    int64_t shared() const { return units(0) * unit_bytes(); }

    // The last segments first: under a causal mask they are the longest.
    int64_t head(int64_t unit) const { return unit % heads; }
    int64_t segment(int64_t unit) const { return segments - 1 - unit / heads; }
};

// One segment of one head: the columns and the rows of cells that its tiles add to.
template <typename T>
struct SweepSegment {
    const regard_sweep &s;
    const regard_call &c;
    const SweepCut cut;
    char *const shared;
    int64_t head, first_query, end_query;
    double *columns;

    SweepSegment(const regard_sweep &sweep, char *memory) : s(sweep), c(sweep.call), cut(sweep), shared(memory) {}

    void enter(int64_t number, int64_t segment) {
        head = number;
        const int64_t rows = cut.per_segment * TILE, end = (segment + 1) * rows;
        first_query = segment * rows;
        end_query = end < c.queries ? end : c.queries;
        columns = shared_columns(head, segment);
    }

    double *shared_columns(int64_t number, int64_t segment) const {
        return reinterpret_cast<double *>(shared + (number * cut.segments + segment) * cut.unit_bytes());
    }

    void clear_shared() {
        memset(columns, 0, size_t(cut.unit_bytes()));
        if (!s.mean) return;
        for (int64_t row = first_row(); row < end_row(); ++row)
            if (is_own(row)) clear(own_cells(row));
    }

    // ---- pictures: a row of cells belongs to the segment that has all of its queries, or is at an edge ----

    struct Cells {
        T *sum, *most;
    };
    int64_t first_row() const { return first_query / s.cell; }
    int64_t end_row() const { return (end_query + s.cell - 1) / s.cell; }
    bool is_own(int64_t row) const {
        const int64_t end = (row + 1) * s.cell;
        return row * s.cell >= first_query && (end < c.queries ? end : c.queries) <= end_query;
    }
    Cells cells(int64_t row) const { return is_own(row) ? own_cells(row) : edge_cells(row); }
    Cells own_cells(int64_t row) const {
        const int64_t at = (head * cut.rows + row) * cut.cells;
        return {static_cast<T *>(s.mean) + at, static_cast<T *>(s.largest) + at};
    }
    Cells edge_cells(int64_t row) const {
        char *at = reinterpret_cast<char *>(columns) + cut.columns_bytes();
        if (row != first_row()) at += 2 * cut.edge_bytes();
        return {reinterpret_cast<T *>(at), reinterpret_cast<T *>(at + cut.edge_bytes())};
    }

    void clear(const Cells &row) const {
        memset(row.sum, 0, size_t(cut.cells) * sizeof(T));
        memset(row.most, 0, size_t(cut.cells) * sizeof(T));
    }
    void add_edge(int64_t row) const {
        const Cells to = own_cells(row), from = edge_cells(row);
        for (int64_t i = 0; i < cut.cells; ++i) {
            to.sum[i] += from.sum[i];
            to.most[i] = from.most[i] > to.most[i] ? from.most[i] : to.most[i];
        }
    }

    // ---- the segments of a head, put together ----

    // Columns and pictures of a head, from what its segments have.
    regard_status merge(int64_t number) {
        constexpr int64_t SOME = 1024;
        T *out = static_cast<T *>(s.columns) + number * c.keys;
        for (int64_t first = 0; first < c.keys; first += SOME) {
            double sums[SOME] = {};
            const int64_t count = least(SOME, c.keys - first);
            for (int64_t n = 0; n < cut.segments; ++n) {
                const double *from = shared_columns(number, n) + first;
                for (int64_t j = 0; j < count; ++j) sums[j] += from[j];
            }
            for (int64_t j = 0; j < count; ++j) out[first + j] = T(sums[j]);
        }
        if (s.mean) merge_cells(number);
        return REGARD_DONE;
    }

    // Rows of cells that several segments have: made 0, and then summed. Then all sums become means.
    void merge_cells(int64_t number) {
        for (int adding = 0; adding < 2; ++adding)
            for (int64_t n = 0; n < cut.segments; ++n) {
                enter(number, n);
                for (int64_t row = first_row(); row < end_row(); ++row)
                    if (!is_own(row)) adding ? add_edge(row) : clear(own_cells(row));
            }
        for (int64_t row = 0; row < cut.rows; ++row) {
            const T down = T(extent(row, c.queries));
            T *sum = own_cells(row).sum;
            for (int64_t i = 0; i < cut.cells; ++i) sum[i] /= down * T(extent(i, c.keys));
        }
    }

    int64_t extent(int64_t cell, int64_t tokens) const {
        return tokens - cell * s.cell < s.cell ? tokens - cell * s.cell : s.cell;
    }
};

}  // namespace REGARD_ISA
}  // namespace regard
