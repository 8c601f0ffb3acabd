//! The figure: the time of a step over the number of outstanding receives, in each mode.

use std::fmt::Write as _;

use tonic_rdma_graph::schedule::ReceiveMode;

use crate::{EACH, Medians, OUTSTANDING};

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const TOP: f64 = 60.0;
const BOTTOM: f64 = 360.0;
/// Colours that stay distinct for readers with red-green colour blindness, in the order of the modes.
const COLOURS: [&str; 3] = ["#3377bb", "#dd6622", "#888888"];

/// Draws bars: how many times as long as its computing each step takes.
pub(crate) fn bars(medians: &Medians) -> String {
    let times = |outstanding: usize, mode: usize| {
        medians[&(outstanding, mode)].step.div_duration_f64(EACH * 2 * outstanding as u32)
    };
    let all = OUTSTANDING.iter().flat_map(|outstanding| (0..3).map(move |mode| times(*outstanding, mode)));
    let most = all.fold(1.0_f64, f64::max).ceil();
    let mut svg = format!(
        "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" xmlns=\"http://www.w3.org/2000/svg\" \
         font-family=\"sans-serif\" font-size=\"13\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    text(
        &mut svg,
        WIDTH / 2.0,
        24.0,
        "middle",
        "Time of a step, as a multiple of its computing (lower is better)",
    );
    let y = |value: f64| BOTTOM - (BOTTOM - TOP) * value / most;
    let lines = (most * 2.0) as u32;
    for line in 0..=lines {
        let value = f64::from(line) / 2.0;
        let _ = writeln!(
            svg,
            "<line x1=\"{LEFT}\" x2=\"{}\" y1=\"{:.1}\" y2=\"{1:.1}\" stroke=\"#cccccc\"/>",
            WIDTH - 20.0,
            y(value)
        );
        text(&mut svg, LEFT - 8.0, y(value) + 4.0, "end", &format!("{value:.1}"));
    }
    let group = (WIDTH - 20.0 - LEFT) / OUTSTANDING.len() as f64;
    let width = group / 4.0;
    for (at, outstanding) in OUTSTANDING.into_iter().enumerate() {
        let left = LEFT + group * at as f64 + width / 2.0;
        for (mode, colour) in COLOURS.into_iter().enumerate() {
            let value = times(outstanding, mode);
            let x = left + width * mode as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{x:.1}\" y=\"{:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{colour}\"/>",
                y(value),
                width * 0.9,
                BOTTOM - y(value)
            );
            text(&mut svg, x + width * 0.45, y(value) - 4.0, "middle", &format!("{value:.2}"));
        }
        text(&mut svg, left + width * 1.5, BOTTOM + 18.0, "middle", &outstanding.to_string());
    }
    text(&mut svg, WIDTH / 2.0, BOTTOM + 38.0, "middle", "receives outstanding at once");
    for (mode, colour) in COLOURS.into_iter().enumerate() {
        let x = LEFT + 150.0 * mode as f64;
        let _ = writeln!(svg, "<rect x=\"{x}\" y=\"34\" width=\"12\" height=\"12\" fill=\"{colour}\"/>");
        text(&mut svg, x + 18.0, 45.0, "start", &ReceiveMode::ALL[mode].to_string());
    }
    svg.push_str("</svg>\n");
    svg
}

fn text(svg: &mut String, x: f64, y: f64, anchor: &str, text: &str) {
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{text}</text>");
}
