//! Outcomes of cases, and the comparison of a case with its control: this peer and case over plain TCP and
//! tonic's own transport.
//!
//! A case has to have the outcome of the control. A case that passes in the control has to pass here, so that
//! a failure or an `n/a` of our transport is found. A failure in both is expected only if
//! [`upstream`](crate::upstream) lists it, and if both have a message from the list. A case that fails at
//! times has no useful control: its message alone decides.

use std::collections::BTreeMap;

use crate::upstream::KnownFailure;

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
fn own_words(reason: &str) -> &str {
    reason.split(SERVER_OUTPUT).next().unwrap_or_default()
}

/// Start of the reason if the client printed no line for a case.
pub(crate) const NO_LINE: &str = "the client printed no line for it";

/// Reads the output of a client, whose form interop/README.md describes. A case without a line has failed for
/// the reason `otherwise`.
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

/// Removes control characters, and cuts the text. Reasons come from peers, and must not control or fill a
/// terminal.
pub(crate) fn printable(text: &str) -> String {
    text.chars().take(400).map(|it| if it.is_control() { ' ' } else { it }).collect()
}

/// Returns the judged outcome. `control` is the control's outcome before it was judged. It is `None` for a
/// control itself, and if the controls were not run.
pub(crate) fn judge(outcome: &Outcome, control: Option<&Outcome>, known: Option<&KnownFailure>) -> Outcome {
    match known {
        Some(known) => listed(outcome, control, known),
        None => unlisted(outcome, control),
    }
}

/// Judges a case with a listed failure.
fn listed(outcome: &Outcome, control: Option<&Outcome>, known: &KnownFailure) -> Outcome {
    let as_listed = |it: &Outcome| match it {
        Outcome::Failed(words) => known.messages.iter().any(|message| own_words(words).contains(message)),
        _ => false,
    };
    match (outcome, control) {
        (Outcome::Failed(words), _) if !as_listed(outcome) => Outcome::Failed(format!(
            "upstream.rs lists it with {:?}, and it failed otherwise: {words}",
            known.messages
        )),
        (Outcome::Failed(_), _) if known.at_times => Outcome::Upstream(known.reason),
        _ if known.at_times => unlisted(outcome, control),
        (Outcome::Failed(words), Some(control)) if !as_listed(control) => Outcome::Failed(format!(
            "upstream.rs lists it with {:?}, and the control {}; here: {words}",
            known.messages,
            described(control)
        )),
        (Outcome::Failed(_), _) => Outcome::Upstream(known.reason),
        _ => Outcome::Stale(known.reason),
    }
}

/// Judges a case without a listed failure.
fn unlisted(outcome: &Outcome, control: Option<&Outcome>) -> Outcome {
    match (outcome, control) {
        (Outcome::NotApplicable(_), Some(Outcome::NotApplicable(_))) | (_, None) => outcome.clone(),
        (Outcome::NotApplicable(reason), Some(control)) => {
            Outcome::Failed(format!("n/a here ({reason}), and the control {}", described(control)))
        }
        (Outcome::Passed, Some(control @ Outcome::NotApplicable(_))) => {
            Outcome::Failed(format!("it passed, and the control {}", described(control)))
        }
        _ => outcome.clone(),
    }
}

fn described(control: &Outcome) -> String {
    match control {
        Outcome::Passed => "passed".to_owned(),
        Outcome::NotApplicable(reason) => format!("was n/a ({reason})"),
        other => format!("failed otherwise: {}", other.reason()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::direction::Role;
    use crate::peer::Peer;

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
    const KNOWN: KnownFailure = KnownFailure {
        peer: Peer::Python,
        role: Role::Server,
        case: "checked_zstd",
        messages: &["expected Unimplemented, found Internal"],
        at_times: false,
        reason: "why",
    };

    fn failed(words: &str) -> Outcome {
        Outcome::Failed(words.to_owned())
    }

    fn not_applicable() -> Outcome {
        Outcome::NotApplicable("the library can't".to_owned())
    }

    /// Returns the reason of an outcome that is not expected.
    fn error(outcome: &Outcome, control: Option<&Outcome>, known: Option<&KnownFailure>) -> String {
        let judged = judge(outcome, control, known);
        assert!(!judged.expected(), "{judged:?}");
        judged.reason().to_owned()
    }

    #[test]
    fn a_case_that_passes_in_the_control_has_to_pass_here() {
        let control = Some(&Outcome::Passed);
        assert_eq!(judge(&Outcome::Passed, control, None), Outcome::Passed);
        assert_eq!(judge(&failed("lost"), control, None), failed("lost"));
        let message = error(&not_applicable(), control, None);
        assert_eq!(message, "n/a here (the library can't), and the control passed");
    }

    #[test]
    fn a_case_that_is_not_applicable_is_not_applicable_in_the_control() {
        let control = Some(&not_applicable());
        assert_eq!(judge(&not_applicable(), control, None), not_applicable());
        assert!(error(&Outcome::Passed, control, None).contains("was n/a (the library can't)"));
        assert!(error(&not_applicable(), Some(&failed("lost")), None).contains("failed otherwise: lost"));
    }

    #[test]
    fn an_unlisted_failure_is_a_failure_even_if_the_control_fails_too() {
        assert_eq!(error(&failed("lost"), Some(&failed("lost")), None), "lost");
        assert_eq!(error(&failed("lost"), None, None), "lost");
    }

    #[test]
    fn a_listed_failure_has_a_listed_message_here_and_in_the_control() {
        let as_listed = failed("the server: expected Unimplemented, found Internal (\"unknown\")");
        let upstream = Outcome::Upstream("why");
        assert_eq!(judge(&as_listed, None, Some(&KNOWN)), upstream);
        assert_eq!(judge(&as_listed, Some(&as_listed), Some(&KNOWN)), upstream);

        let other = failed("connection reset");
        for control in [None, Some(&as_listed), Some(&other), Some(&Outcome::Passed)] {
            assert!(error(&other, control, Some(&KNOWN)).ends_with("failed otherwise: connection reset"));
        }
        for control in [Outcome::Passed, not_applicable(), other] {
            let message = error(&as_listed, Some(&control), Some(&KNOWN));
            assert!(message.contains("and the control"), "{message}");
        }
    }

    #[test]
    fn a_case_that_fails_at_times_may_pass_or_fail_with_a_listed_message() {
        let known = KnownFailure { at_times: true, ..KNOWN };
        let as_listed = failed("expected Unimplemented, found Internal");
        for control in [None, Some(&Outcome::Passed), Some(&as_listed)] {
            assert_eq!(judge(&as_listed, control, Some(&known)), Outcome::Upstream("why"));
            assert_eq!(judge(&Outcome::Passed, control, Some(&known)), Outcome::Passed);
            assert!(error(&failed("lost"), control, Some(&known)).ends_with("failed otherwise: lost"));
        }
        assert!(
            error(&not_applicable(), Some(&Outcome::Passed), Some(&known)).contains("the control passed")
        );
    }

    #[test]
    fn the_servers_output_is_not_the_reason_of_a_failure() {
        let words = format!("reset{}expected Unimplemented, found Internal]", super::SERVER_OUTPUT);
        assert!(error(&failed(&words), None, Some(&KNOWN)).contains("failed otherwise"));
    }

    #[test]
    fn an_entry_for_a_case_that_does_not_fail_is_stale() {
        for outcome in [Outcome::Passed, not_applicable()] {
            assert_eq!(judge(&outcome, None, Some(&KNOWN)), Outcome::Stale("why"));
        }
    }
}
