//! Outcomes of cases.

pub(crate) mod judge;
pub(crate) mod upstream;

use std::collections::BTreeMap;

/// The outcome of a case, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    /// The peer's library can't run the case.
    NotApplicable(String),
    Failed(String),
    /// The case fails without our transport too, for this known reason.
    Upstream(&'static str),
    /// The case does not fail, although it is listed as a failure.
    Stale(&'static str),
}

impl Outcome {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::NotApplicable(_) => "n/a",
            Self::Failed(_) => "failed",
            Self::Upstream(_) => "upstream",
            Self::Stale(_) => "stale",
        }
    }

    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::Passed => "",
            Self::NotApplicable(reason) | Self::Failed(reason) => reason,
            Self::Upstream(reason) | Self::Stale(reason) => reason,
        }
    }

    /// Returns whether the outcome needs no attention.
    pub(crate) fn expected(&self) -> bool {
        !matches!(self, Self::Failed(_) | Self::Stale(_))
    }
}

/// Outcomes by case.
pub(crate) type Outcomes = BTreeMap<String, Outcome>;

/// Separator between the reason of a case and the server's output.
pub(crate) const SERVER_OUTPUT: &str = " [server: ";

/// Returns the reason without the server's output.
pub(crate) fn own_words(reason: &str) -> &str {
    reason.split(SERVER_OUTPUT).next().unwrap_or_default()
}

/// Start of the reason if the client printed no line for a case.
pub(crate) const NO_LINE: &str = "the client printed no line for it";

/// Reads the output of a client, whose form interop/README.md describes. A case without a line has failed for the reason
/// `otherwise`.
pub(crate) fn read(output: &str, cases: &[String], otherwise: &str) -> Outcomes {
    let mut outcomes: Outcomes =
        cases.iter().map(|case| (case.clone(), Outcome::Failed(otherwise.to_owned()))).collect();
    for line in output.lines() {
        let Some((case, rest)) = line.split_once(' ') else { continue };
        let Some(outcome) = outcomes.get_mut(case) else { continue };
        if rest == "ok" {
            *outcome = Outcome::Passed;
        } else if let Some(reason) = rest.strip_prefix("skipped: ") {
            *outcome = Outcome::NotApplicable(printable(reason));
        } else if let Some(reason) = rest.strip_prefix("failed: ") {
            *outcome = Outcome::Failed(printable(reason));
        }
    }
    outcomes
}

/// Removes control characters, and cuts the text. Reasons come from peers, and must not control or fill a terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().take(400).map(|it| if it.is_control() { ' ' } else { it }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(output: &str) -> Outcome {
        read(output, &["ping_pong".to_owned()], "no line").remove("ping_pong").unwrap()
    }

    #[test]
    fn a_clients_lines_are_read() {
        assert_eq!(outcome("over rdma\nping_pong ok\n"), Outcome::Passed);
        assert_eq!(outcome("ping_pong failed: too late"), Outcome::Failed("too late".to_owned()));
        assert_eq!(outcome("ping_pong skipped: can't"), Outcome::NotApplicable("can't".to_owned()));
    }

    #[test]
    fn a_case_without_a_line_has_failed() {
        for output in ["", "ping_pong", "ping_pong okay", "ping_pong2 ok", "empty_unary ok"] {
            assert_eq!(outcome(output), Outcome::Failed("no line".to_owned()), "{output}");
        }
    }

    #[test]
    fn a_reason_has_no_control_characters() {
        assert_eq!(outcome("ping_pong failed: \u{1b}[2Jred"), Outcome::Failed(" [2Jred".to_owned()));
        assert_eq!(printable(&"x".repeat(1000)).len(), 400);
    }
}
