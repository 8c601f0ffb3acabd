//! How a command begins and ends: log messages, refusals of clap, exit status.

use std::io::{self, IsTerminal as _, Write as _};
use std::process::ExitCode;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::failure::{Failure, one_line};

/// Sends log messages to stderr. The filter is `option`, the value of `--log`, else the variable `RUST_LOG`,
/// else `usual`. An empty variable counts as none.
///
/// # Errors
///
/// Fails if the filter can't be parsed. The error names the option or the variable.
pub fn log(option: Option<&str>, usual: &str) -> Result<(), Failure> {
    let variable = std::env::var_os("RUST_LOG").filter(|filter| !filter.is_empty());
    let variable = variable.map(|filter| filter.to_string_lossy().into_owned());
    let (origin, filter) = match (option, &variable) {
        (Some(option), _) => ("--log ", option),
        (None, Some(variable)) => ("RUST_LOG=", variable.as_str()),
        (None, None) => ("", usual),
    };
    let targets = parse_filter(filter).map_err(|reason| {
        Failure::usage(format!(
            "{origin}{filter}: {reason}; accepted: error, warn, info, debug, trace, off, or target=level, \
             separated by commas, such as warn,tonic_rdma=info"
        ))
    })?;
    let lines =
        tracing_subscriber::fmt::layer().with_ansi(io::stderr().is_terminal()).with_writer(io::stderr);
    tracing_subscriber::registry().with(lines).with(targets).init();
    Ok(())
}

/// Parses a filter, in which each target needs a level. Otherwise a misspelt level would be a target, and
/// hide all messages.
fn parse_filter(filter: &str) -> Result<Targets, String> {
    let mut parts = Vec::new();
    for part in filter.split(',') {
        // Blanks would belong to a target's name.
        let (target, level) =
            part.rsplit_once('=').map_or((None, part), |(target, level)| (Some(target), level));
        let level = level.trim();
        if level.is_empty() || level.parse::<LevelFilter>().is_err() {
            return Err(format!("{level:?} is no level"));
        }
        parts.push(target.map_or_else(|| level.to_owned(), |target| format!("{}={level}", target.trim())));
    }
    parts.join(",").parse().map_err(|error| format!("{error}"))
}

/// Parses the options of a bench, or ends the process as clap does. cargo adds the flag `--bench` to the
/// command line of a bench, which is no option of it.
pub fn bench_options<T: clap::Parser>() -> T {
    T::parse_from(std::env::args_os().filter(|argument| argument != "--bench"))
}

/// Shows help or version, if `error` is such a request. Otherwise returns clap's message as a failure of one
/// line.
///
/// # Errors
///
/// Returns the failure of the command line, or of stdout.
pub fn explain(error: &clap::Error, command: &Command) -> Result<(), Failure> {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            error.print().and_then(|()| io::stdout().flush()).map_err(|error| Failure::output(&error))
        }
        _ => {
            // Only clap's usage line names the subcommand that was being parsed.
            let name = std::env::args_os().nth(1).unwrap_or_default();
            Err(Failure::usage(refusal(error, command.find_subcommand(name).unwrap_or(command))))
        }
    }
}

/// Returns clap's message in one line, with what was probably meant, or else with what is accepted.
fn refusal(error: &clap::Error, command: &Command) -> String {
    let rendered = error.render().to_string();
    let lines = rendered.split("\n\n").next().unwrap_or_default().lines().map(str::trim);
    // `accepted` has the possible values, in the form that all messages share.
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with("[possible values")).collect();
    let (kind, message) = (error.kind(), one_line(&lines.join(" ")));
    let message = message.strip_prefix("error: ").unwrap_or(&message).trim_end_matches('.');
    let accepted = match kind {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return format!("a command is missing; accepted: {}", subcommands(command));
        }
        ErrorKind::InvalidValue => strings(error, ContextKind::ValidValue).join(", "),
        _ => String::new(),
    };
    let meant = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    // The best suggestion is clap's last one.
    let mut meant = meant.into_iter().flat_map(|kind| strings(error, kind));
    let meant = meant.rfind(|text| !is_hidden(command, text));
    let accepted = match (kind, &meant) {
        (ErrorKind::UnknownArgument, None) => flags(command),
        (ErrorKind::InvalidSubcommand, _) => subcommands(command),
        _ => accepted,
    };
    match (meant, accepted.as_str()) {
        (None, "") => message.to_owned(),
        (None, accepted) => format!("{message}; accepted: {accepted}"),
        (Some(meant), "") => format!("{message}; did you mean {meant}?"),
        (Some(meant), accepted) => format!("{message}; did you mean {meant}? accepted: {accepted}"),
    }
}

/// Returns the texts that clap keeps of `kind`.
fn strings(error: &clap::Error, kind: ContextKind) -> Vec<String> {
    match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    }
}

fn is_hidden(command: &Command, text: &str) -> bool {
    let long = text.strip_prefix("--").unwrap_or_default();
    let argument = |argument: &clap::Arg| argument.is_hide_set() && argument.get_long() == Some(long);
    let subcommand = |subcommand: &Command| subcommand.is_hide_set() && subcommand.get_name() == text;
    command.get_arguments().any(argument) || command.get_subcommands().any(subcommand)
}

fn subcommands(command: &Command) -> String {
    let shown = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let names = shown.map(Command::get_name).chain(["--help", "--version"]);
    names.collect::<Vec<_>>().join(", ")
}

fn flags(command: &Command) -> String {
    let shown = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let own = shown.filter_map(|argument| argument.get_long()).filter(|name| *name != "help");
    own.chain(["help"]).map(|name| format!("--{name}")).collect::<Vec<_>>().join(", ")
}

/// Reports the failure of the command `name`, if there is one, and returns the exit status.
pub fn status(name: &str, outcome: Result<(), Failure>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failure.report(name),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn a_filter_has_levels() {
        for good in
            ["warn", "OFF", "info,tonic_rdma=debug", "tonic_rdma=trace", "warn, tonic_rdma::bridge=info"]
        {
            parse_filter(good).unwrap();
        }
        for (bad, named) in [
            ("inof", "\"inof\" is no level"),
            ("warn,tonic_rdma", "\"tonic_rdma\" is no level"),
            ("tonic_rdma=inof", "\"inof\" is no level"),
            ("tonic_rdma=", "\"\" is no level"),
            ("warn,", "\"\" is no level"),
            ("", "\"\" is no level"),
        ] {
            assert_eq!(parse_filter(bad).unwrap_err(), named, "{bad}");
        }
    }

    #[test]
    fn blanks_in_a_filter_do_not_count() {
        let level = LevelFilter::WARN.into_level().unwrap();
        for filter in [" warn", "info, warn", "off, a::b = warn", " a::b=warn ,off"] {
            assert!(parse_filter(filter).unwrap().would_enable("a::b", &level), "{filter:?}");
        }
        assert!(!parse_filter("warn, a::b=error").unwrap().would_enable("a::b", &level));
    }

    #[test]
    fn a_refusal_says_what_was_meant_or_is_accepted() {
        let policy = clap::Arg::new("policy").long("policy").value_parser(["require", "prefer"]);
        let modes = clap::Arg::new("modes").long("modes").required(true);
        let secret = clap::Arg::new("policies").long("policies").hide(true);
        let own = Command::new("compare").arg(policy).arg(modes).arg(secret);
        let secret = Command::new("compare-server").hide(true);
        let command = Command::new("x").subcommand_required(true).subcommands([own.clone(), secret]);
        for (line, expected) in [
            (
                &["x", "compre"][..],
                "unrecognized subcommand 'compre'; did you mean compare? accepted: compare, --help, --version",
            ),
            (&["x", "zz"], "unrecognized subcommand 'zz'; accepted: compare, --help, --version"),
            (&["x"], "a command is missing; accepted: compare, --help, --version"),
            (&["x", "compare", "--mode", "a"], "unexpected argument '--mode' found; did you mean --modes?"),
            (
                &["x", "compare", "--policie", "a"],
                "unexpected argument '--policie' found; accepted: --policy, --modes, --help",
            ),
            (
                &["x", "compare", "--zz"],
                "unexpected argument '--zz' found; accepted: --policy, --modes, --help",
            ),
            (
                &["x", "compare", "--policy", "requre"],
                "invalid value 'requre' for '--policy <policy>'; did you mean require? accepted: require, prefer",
            ),
            (
                &["x", "compare", "--policy", "zz"],
                "invalid value 'zz' for '--policy <policy>'; accepted: require, prefer",
            ),
            (&["x", "compare"], "the following required arguments were not provided: --modes <modes>"),
        ] {
            let error = command.clone().try_get_matches_from(line).unwrap_err();
            let at = if line.len() > 2 { &own } else { &command };
            assert_eq!(refusal(&error, at), expected, "{line:?}");
        }
    }
}
