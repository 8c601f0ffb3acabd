//! Compares a case with its control: this peer and case over plain TCP and tonic's own transport.
//!
//! A case has to have the outcome of the control. A case that passes in the control has to pass here, so that a failure or an
//! `n/a` of our transport is found. A failure in both is expected only if [`upstream`](super::upstream) lists it, and if both
//! have a message from the list. A case that fails at times has no useful control: its message alone decides.

use super::upstream::KnownFailure;
use super::{Outcome, own_words};

/// Returns the judged outcome. `control` is the control's outcome before it was judged. It is `None` for a control itself, and if
/// the controls were not run.
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
    use crate::direction::Side;
    use crate::peer::Peer;

    const KNOWN: KnownFailure = KnownFailure {
        peer: Peer::Python,
        side: Side::Server,
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
        let words = format!("reset{}expected Unimplemented, found Internal]", super::super::SERVER_OUTPUT);
        assert!(error(&failed(&words), None, Some(&KNOWN)).contains("failed otherwise"));
    }

    #[test]
    fn an_entry_for_a_case_that_does_not_fail_is_stale() {
        for outcome in [Outcome::Passed, not_applicable()] {
            assert_eq!(judge(&outcome, None, Some(&KNOWN)), Outcome::Stale("why"));
        }
    }
}
