//! How a command begins and ends: log messages, refusals of clap, exit status.

use std::ffi::OsString;
use std::io::{self, Write as _};
use std::process::ExitCode;

use anstream::{AutoStream, ColorChoice};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command, FromArgMatches, Parser, value_parser};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::failure::{Failure, one_line};

/// Runs a command: parses its options, sends log messages to stderr, and reports the failure. Returns the exit
/// status.
pub fn main<O: Parser>(run: impl FnOnce(&O) -> Result<(), Failure>) -> ExitCode {
    let command = O::command();
    let name = command.get_name().to_owned();
    let outcome = parse::<O>(command).and_then(|options| match options {
        Some(options) => log(None, "warn").and_then(|()| run(&options)),
        None => Ok(()),
    });
    status(&name, outcome)
}

/// Parses the command line of this process, with `--color` in addition to the options of `command`. Returns
/// `None` if it has shown help or version. Without any argument where a subcommand is needed, it shows the help
/// on stderr and ends the process with status 2.
///
/// # Errors
///
/// Returns the refusal of the command line in one line, or the failure of stdout.
pub fn parse<O: FromArgMatches>(command: Command) -> Result<Option<O>, Failure> {
    let color = match split_color(std::env::args_os()).1.as_deref() {
        Some("always") => ColorChoice::Always,
        Some("never") => ColorChoice::Never,
        _ => ColorChoice::Auto,
    };
    color.write_global();
    let mut command = prepared(command.arg(color_option()).max_term_width(100));
    let matches = command.try_get_matches_from_mut(std::env::args_os());
    let error = match matches.and_then(|mut matches| O::from_arg_matches_mut(&mut matches)) {
        Ok(options) => return Ok(Some(options)),
        Err(error) => error,
    };
    let is_empty = std::env::args_os().len() <= 1;
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            let shown = error.print().and_then(|()| io::stdout().flush());
            shown.map(|()| None).map_err(|error| Failure::output(&error))
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if is_empty => {
            // To stderr, because a missing command is an error.
            error.print().map_err(|error| Failure::output(&error))?;
            #[expect(clippy::disallowed_methods, reason = "nothing has been started yet")]
            std::process::exit(2)
        }
        _ => Err(Failure::usage(refusal(&error, &command, std::env::args_os()))),
    }
}

/// Lets each option take a negative number, so that its own parser refuses it and says what is accepted.
pub(crate) fn prepared(command: Command) -> Command {
    let negative = |argument: Arg| match argument.get_action().takes_values() {
        true => argument.allow_negative_numbers(true),
        false => argument,
    };
    command.mut_args(negative).mut_subcommands(prepared)
}

/// The option `--color`, which [`parse`] adds.
pub fn color_option() -> Arg {
    Arg::new("color")
        .long("color")
        .global(true)
        .hide_short_help(true)
        .hide_possible_values(true)
        .value_name("auto|always|never")
        .value_parser(value_parser!(clap::ColorChoice))
        .help("Colours of help and log messages [default: auto: on a terminal, if NO_COLOR is not set]")
}

/// Takes `--color` out of a command line. Returns the rest, and the value.
pub(crate) fn split_color(arguments: impl IntoIterator<Item = OsString>) -> (Vec<OsString>, Option<String>) {
    let (mut rest, mut color) = (Vec::new(), None);
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        match argument.to_str() {
            Some("--color") => color = arguments.next().and_then(|value| value.into_string().ok()),
            Some(text) if text.starts_with("--color=") => color = Some(text["--color=".len()..].to_owned()),
            _ => rest.push(argument),
        }
    }
    (rest, color)
}

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
    let is_colored = AutoStream::choice(&io::stderr()) != ColorChoice::Never;
    let lines = tracing_subscriber::fmt::layer().with_ansi(is_colored).with_writer(io::stderr);
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

/// Returns clap's message for the command line `arguments` in one line, with what was probably meant, or else with
/// what is accepted.
fn refusal(error: &clap::Error, command: &Command, arguments: impl IntoIterator<Item = OsString>) -> String {
    let kind = error.kind();
    // Only clap's usage line names the subcommand that was being parsed.
    let mut arguments = arguments.into_iter().skip(1);
    let command = arguments.find_map(|name| command.find_subcommand(name)).unwrap_or(command);
    let rendered = error.render().to_string();
    let lines = rendered.split("\n\n").next().unwrap_or_default().lines().map(str::trim);
    // `accepted` has the possible values, in the form that all messages share.
    let lines: Vec<&str> = lines.filter(|line| !line.starts_with("[possible values")).collect();
    let message = one_line(&lines.join(" "));
    let message = message.strip_prefix("error: ").unwrap_or(&message).trim_end_matches('.');
    let given = strings(error, ContextKind::InvalidArg).pop().unwrap_or_default();
    let accepted = match kind {
        ErrorKind::MissingSubcommand | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            return format!("a command is missing; accepted: {}", subcommands(command));
        }
        ErrorKind::MissingRequiredArgument => {
            let name = command.get_bin_name().unwrap_or(command.get_name());
            return format!("{message}; `{name} --help` explains them");
        }
        ErrorKind::UnknownArgument if is_negative(&given) => {
            return format!("unexpected argument '{given}' found; no number, size or time is negative");
        }
        ErrorKind::InvalidValue => strings(error, ContextKind::ValidValue).join(", "),
        _ => String::new(),
    };
    let meant = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand, ContextKind::SuggestedValue];
    // The best suggestion is clap's last one.
    let mut meant = meant.into_iter().flat_map(|kind| strings(error, kind));
    let meant = meant.rfind(|text| !is_hidden(command, text)).or_else(|| meant_server(command, kind, &given));
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

fn is_negative(text: &str) -> bool {
    text.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

/// Returns the option for an address that was given without one, as clients of other programs take it.
fn meant_server(command: &Command, kind: ErrorKind, given: &str) -> Option<String> {
    let takes_server = command.get_arguments().any(|argument| argument.get_long() == Some("server"));
    let is_plain = kind == ErrorKind::UnknownArgument && !given.starts_with('-') && !given.is_empty();
    let port = if given.contains(':') { "" } else { ":PORT" };
    (takes_server && is_plain).then(|| format!("--server {given}{port}"))
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
        let others = ["server", "limit"].map(|name| clap::Arg::new(name).long(name));
        let limit =
            |it: clap::Arg| if it.get_id() == "limit" { it.value_parser(value_parser!(u8)) } else { it };
        let own = Command::new("compare").arg(policy).arg(modes).arg(secret).args(others.map(limit));
        let secret = Command::new("compare-server").hide(true);
        let command = Command::new("x").subcommand_required(true).subcommands([own, secret]);
        for (line, expected) in [
            (
                &["x", "compre"][..],
                "unrecognized subcommand 'compre'; did you mean compare? accepted: compare, help, --help, --version",
            ),
            (&["x", "zz"], "unrecognized subcommand 'zz'; accepted: compare, help, --help, --version"),
            (&["x"], "a command is missing; accepted: compare, help, --help, --version"),
            (&["x", "compare", "--mode", "a"], "unexpected argument '--mode' found; did you mean --modes?"),
            (
                &["x", "compare", "--policie", "a"],
                "unexpected argument '--policie' found; accepted: --policy, --modes, --server, --limit, --help",
            ),
            (
                &["x", "compare", "--zz"],
                "unexpected argument '--zz' found; accepted: --policy, --modes, --server, --limit, --help",
            ),
            (
                &["x", "compare", "--policy", "requre"],
                "invalid value 'requre' for '--policy <policy>'; did you mean require? accepted: require, prefer",
            ),
            (
                &["x", "compare", "--policy", "zz"],
                "invalid value 'zz' for '--policy <policy>'; accepted: require, prefer",
            ),
            (
                &["x", "compare", "--limit", "-5"],
                "invalid value '-5' for '--limit <limit>': -5 is not in 0..=255",
            ),
            (
                &["x", "compare", "--limit", "-5s"],
                "unexpected argument '-5' found; no number, size or time is negative",
            ),
            (
                &["x", "compare", "127.0.0.1"],
                "unexpected argument '127.0.0.1' found; did you mean --server 127.0.0.1:PORT?",
            ),
            (
                &["x", "compare", "[::1]:7"],
                "unexpected argument '[::1]:7' found; did you mean --server [::1]:7?",
            ),
            (
                &["x", "compare"],
                "the following required arguments were not provided: --modes <modes>; `x compare --help` explains them",
            ),
        ] {
            let mut command = prepared(command.clone());
            let error = command.try_get_matches_from_mut(line).unwrap_err();
            assert_eq!(refusal(&error, &command, line.iter().map(OsString::from)), expected, "{line:?}");
        }
    }

    #[test]
    fn color_is_taken_out_of_a_command_line() {
        for (line, rest, color) in [
            (&["x", "--color", "never", "y"][..], &["x", "y"][..], Some("never")),
            (&["x", "y", "--color=always"], &["x", "y"], Some("always")),
            (&["x", "--colors"], &["x", "--colors"], None),
        ] {
            let split = split_color(line.iter().map(OsString::from));
            assert_eq!(split, (rest.iter().map(OsString::from).collect(), color.map(str::to_owned)));
        }
    }
}
