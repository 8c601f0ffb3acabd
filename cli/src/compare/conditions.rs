//! The conditions of both processes: runtime, cores, allocator.

use super::options::CompareOptions;
use crate::measure::machine::costs::Costs;
use crate::measure::process::allocator::Allocator;
use crate::measure::process::cores::Cores;
use crate::measure::process::runtime::Flavour;

/// The conditions of a run. All of its modes share them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conditions {
    pub(crate) runtime: Flavour,
    /// Whether each process stays on a core of its own, if it has one thread and there are two cores.
    pub(crate) pin: bool,
    pub(crate) allocator: Allocator,
    /// Whether `--newcomer` was given.
    pub(crate) newcomer: bool,
}

/// The conditions of a run, with the cores in use and the costs of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunContext {
    pub(crate) conditions: Conditions,
    /// The cores that the processes are kept on.
    pub(crate) cores: Option<Cores>,
    pub(crate) costs: Costs,
}

impl Conditions {
    /// Returns the conditions that `options` ask for. `--newcomer` sets the conditions of a program that chooses
    /// nothing. Options that are given beside `--newcomer` take precedence.
    pub(crate) fn of(options: &CompareOptions) -> Self {
        let newcomer = options.newcomer;
        let usual = match newcomer {
            false => {
                Self { runtime: Flavour::IdlePolling, pin: true, allocator: Allocator::Mimalloc, newcomer }
            }
            true => {
                Self { runtime: Flavour::multi_thread(), pin: false, allocator: Allocator::System, newcomer }
            }
        };
        Self {
            runtime: options.runtime.unwrap_or(usual.runtime),
            pin: options.pin.unwrap_or(usual.pin),
            allocator: options.allocator.unwrap_or(usual.allocator),
            newcomer,
        }
    }

    /// Returns a core for each of the two processes, if they are kept on one core each. A multi-thread runtime gets no
    /// core, because its threads need more than one.
    pub(crate) fn cores(&self) -> Option<Cores> {
        (self.pin && self.runtime.is_one_thread()).then(Cores::choose).flatten()
    }

    /// Returns the reason why the processes are not pinned.
    pub(crate) const fn why_not_pinned(&self) -> &'static str {
        match (self.pin, self.runtime.is_one_thread()) {
            (false, _) => "--pin no",
            (true, false) => "both use all cores",
            (true, true) => "there are no two cores to pin to",
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

    use super::*;

    fn of(arguments: &[&str]) -> Conditions {
        Conditions::of(&CompareOptions::of(arguments))
    }

    #[test]
    fn explicit_options_override_the_conditions_of_newcomer() {
        let usual = of(&[]);
        assert_eq!((usual.runtime, usual.pin), (Flavour::IdlePolling, true));
        assert_eq!((usual.allocator, usual.newcomer), (Allocator::Mimalloc, false));
        let newcomer = of(&["--newcomer"]);
        assert_eq!((newcomer.runtime, newcomer.pin), (Flavour::multi_thread(), false));
        assert_eq!((newcomer.allocator, newcomer.newcomer), (Allocator::System, true));
        for (arguments, expected) in [
            (["--runtime", "current-thread"], Conditions { runtime: Flavour::CurrentThread, ..newcomer }),
            (["--pin", "yes"], Conditions { pin: true, ..newcomer }),
            (["--allocator", "mimalloc"], Conditions { allocator: Allocator::Mimalloc, ..newcomer }),
        ] {
            assert_eq!(of(&[&arguments[..], &["--newcomer"]].concat()), expected);
            assert_eq!(of(&[&["--newcomer"][..], &arguments].concat()), expected);
        }
    }

    #[test]
    fn processes_are_pinned_only_with_one_thread_and_without_pin_no() {
        assert_eq!(of(&[]).cores(), Cores::choose());
        assert_eq!(of(&["--runtime", "current-thread"]).cores(), Cores::choose());
        for (arguments, reason) in [
            (&["--pin", "no"][..], "--pin no"),
            (&["--newcomer"], "--pin no"),
            (&["--newcomer", "--pin", "yes"], "both use all cores"),
            (&["--runtime", "multi-thread:1"], "both use all cores"),
        ] {
            assert_eq!((of(arguments).cores(), of(arguments).why_not_pinned()), (None, reason));
        }
    }
}
