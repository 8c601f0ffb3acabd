//! The progress bar on stderr.

use std::io::IsTerminal;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Makes a progress bar of `turns` steps. The bar is hidden where stderr is not a terminal.
pub(crate) fn progress_bar(turns: u64) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(turns), target);
    match ProgressStyle::with_template("{bar:40} {percent:>3} %  {elapsed} of about {duration}  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
