//! Draws what happened in an operation: a row of ranks for each state, and an arrow for each message.

use std::fmt::Write as _;
use std::ops::Range;

use super::rounds::{History, Message, Sum};

/// The words of a picture.
pub(super) struct Names {
    pub(super) title: &'static str,
    /// A round in which received elements are added.
    pub(super) sums: &'static str,
    /// A round in which received elements are kept.
    pub(super) copies: &'static str,
}

const MARGIN: usize = 118;
const CELL: usize = 40;
const HEIGHT: usize = 26;
const GAP: usize = 24;
/// From one state to the next.
const ROW: usize = 84;
const TOP: usize = 44;

/// The colours on dark pages.
const STYLE: &str = "<style>\
@media(prefers-color-scheme:dark){svg{fill:#f0f6fc}[fill='#ffffff']{fill:#0d1117}\
[fill='#ddf4ff']{fill:#0c2d6b}[fill='#b6e3ff']{fill:#0f4a9c}[fill='#aceebb']{fill:#12602b}\
[fill='#57606a']{fill:#9198a1}[stroke='#57606a']{stroke:#9198a1}[fill='#c2410c']{fill:#f0883e}\
[stroke='#c2410c']{stroke:#f0883e}[fill='#0969da']{fill:#4493f8}\
[stroke='#0969da']{stroke:#4493f8}[fill='#8250df']{fill:#ab7df8}\
[stroke='#8250df']{stroke:#ab7df8}[fill='#1a7f37']{fill:#3fb950}\
[stroke='#1a7f37']{stroke:#3fb950}}</style>";

/// The colour of the arrows of each rank.
const COLOURS: [&str; 4] = ["#c2410c", "#0969da", "#8250df", "#1a7f37"];
/// The colour of an element, by how much of the sum is in it.
const FILLS: [&str; 4] = ["#ffffff", "#ddf4ff", "#b6e3ff", "#aceebb"];

/// Draws a history of an all-reduce.
pub(super) fn draw(history: &History, names: &Names) -> String {
    let ranks = history.states[0].len();
    let width = left(ranks, history) - GAP + 16;
    let height = TOP + history.rounds.len() * ROW + HEIGHT + 64;
    let mut svg = String::new();
    head(&mut svg, width, height, &format!("{} of {ranks} ranks", names.title));
    for rank in 0..ranks {
        let x = left(rank, history) + history.states[0][rank].len() * CELL / 2;
        text(&mut svg, x, 24, "middle", " font-weight=\"bold\"", &format!("rank {rank}"));
    }
    text(&mut svg, 12, TOP + 17, "start", "", "begin");
    for (number, round) in history.rounds.iter().enumerate() {
        let y = TOP + (number + 1) * ROW;
        let is_sum = round.iter().any(|message| message.reduces);
        text(&mut svg, 12, y + 8, "start", "", if is_sum { names.sums } else { names.copies });
        text(&mut svg, 12, y + 24, "start", " fill=\"#57606a\"", &format!("round {}", number + 1));
    }
    for (number, state) in history.states.iter().enumerate() {
        let written = number.checked_sub(1).map_or(&[][..], |round| &history.rounds[round]);
        for (rank, sums) in state.iter().enumerate() {
            for (element, sum) in sums.iter().enumerate() {
                let fresh =
                    written.iter().any(|message| message.to == rank && message.range.contains(&element));
                cell(
                    &mut svg,
                    (left(rank, history) + element * CELL, TOP + number * ROW),
                    *sum,
                    fresh,
                    ranks,
                );
            }
        }
    }
    for (number, message) in
        history.rounds.iter().enumerate().flat_map(|(n, r)| r.iter().map(move |m| (n, m)))
    {
        arrow(&mut svg, history, number, message);
    }
    foot(&mut svg, history, height);
    svg + "</svg>\n"
}

/// Returns where the elements of a rank begin.
fn left(rank: usize, history: &History) -> usize {
    MARGIN + rank * (history.states[0][0].len() * CELL + GAP)
}

fn head(svg: &mut String, width: usize, height: usize, label: &str) {
    line(
        svg,
        &format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" role=\"img\" \
             aria-label=\"{label}\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#1f2328\">"
        ),
    );
    line(svg, STYLE);
    line(svg, &format!("<rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>"));
    line(svg, "<defs>");
    for (rank, colour) in COLOURS.iter().enumerate() {
        line(
            svg,
            &format!(
                "<marker id=\"a{rank}\" viewBox=\"0 0 10 10\" refX=\"9\" refY=\"5\" markerWidth=\"8\" markerHeight=\"8\" \
                 orient=\"auto\"><path d=\"M0 0 L10 5 L0 10 z\" fill=\"{colour}\"/></marker>"
            ),
        );
    }
    line(svg, "</defs>");
}

/// Draws an element, with the ranks whose elements are in its sum.
fn cell(svg: &mut String, (x, y): (usize, usize), sum: Sum, fresh: bool, ranks: usize) {
    let has = |rank: &usize| sum & (1 << rank) != 0;
    let count = (0..ranks).filter(has).count();
    let label = match count {
        count if count == ranks => "all".to_owned(),
        _ => (0..ranks).filter(has).map(|rank| rank.to_string()).collect::<Vec<_>>().join("+"),
    };
    let fill = FILLS[if count == ranks { FILLS.len() - 1 } else { (count - 1).min(FILLS.len() - 2) }];
    let stroke = if fresh { 2 } else { 1 };
    line(
        svg,
        &format!(
            "<rect x=\"{x}\" y=\"{y}\" width=\"{CELL}\" height=\"{HEIGHT}\" fill=\"{fill}\" stroke=\"#57606a\" \
             stroke-width=\"{stroke}\"/>"
        ),
    );
    text(svg, x + CELL / 2, y + 17, "middle", " font-size=\"10\"", &label);
}

fn arrow(svg: &mut String, history: &History, round: usize, message: &Message) {
    let middle =
        |rank: usize, range: &Range<usize>| left(rank, history) + (range.start * CELL + range.end * CELL) / 2;
    let (from, to) = (middle(message.from, &message.range), middle(message.to, &message.range));
    let (above, below) = (TOP + round * ROW + HEIGHT + 2, TOP + (round + 1) * ROW - 3);
    let rank = message.from % COLOURS.len();
    line(
        svg,
        &format!(
            "<path d=\"M{from} {above} L{to} {below}\" stroke=\"{}\" stroke-width=\"1.8\" fill=\"none\" \
             marker-end=\"url(#a{rank})\"/>",
            COLOURS[rank]
        ),
    );
}

fn foot(svg: &mut String, history: &History, height: usize) {
    let elements = history.states[0][0].len();
    let sent = history.elements_sent(0);
    let note = format!(
        "A box is one of the {elements} parts of the elements, with the ranks whose values are in its sum. Bold boxes have just \
         arrived."
    );
    text(svg, 12, height - 34, "start", " font-size=\"12\" fill=\"#57606a\"", &note);
    let rounds = history.rounds.len();
    let note = format!(
        "{rounds} round{}. Each rank sends {sent} parts; all elements together are {elements} parts.",
        if rounds == 1 { "" } else { "s" }
    );
    text(svg, 12, height - 14, "start", " font-size=\"12\" fill=\"#57606a\"", &note);
}

fn text(svg: &mut String, x: usize, y: usize, anchor: &str, style: &str, words: &str) {
    line(svg, &format!("<text x=\"{x}\" y=\"{y}\" text-anchor=\"{anchor}\"{style}>{words}</text>"));
}

fn line(svg: &mut String, words: &str) {
    writeln!(svg, "{words}").unwrap();
}
