//! What this program says of itself: version, completions of shells, and pages for `man`.

use std::path::PathBuf;
use std::sync::LazyLock;

use clap::{Args, Command};
use clap_complete::Shell;
use tonic_rdma::unstable::wire::hello;
use tonic_rdma_commands::{Context as _, Failure, output};
use tonic_rdma_tensor::unstable::SERVICE_VERSIONS;
use tonic_rdma_verbs::unstable::{SOFT_VERSIONS, Versions};

/// The text of `--version` after the name: the version, and a line `NAME: VALUE` for each thing that decides what
/// this program can do, and with whom.
pub(crate) static VERSION: LazyLock<String> = LazyLock::new(|| {
    let spoken = |versions: Versions| match versions.oldest == versions.newest {
        true => versions.newest.to_string(),
        false => format!("{}-{}", versions.oldest, versions.newest),
    };
    let commit = if env!("COMMIT").is_empty() { "unknown" } else { env!("COMMIT") };
    let facts = [
        ("commit", commit.to_owned()),
        ("ibverbs", if cfg!(feature = "ibverbs") { "yes" } else { "no" }.to_owned()),
        ("hello", spoken(hello::VERSIONS)),
        ("hello_layout", hello::LAYOUT.to_string()),
        ("soft", spoken(SOFT_VERSIONS)),
        ("tensor_service", spoken(SERVICE_VERSIONS)),
        ("rust_version", env!("CARGO_PKG_RUST_VERSION").to_owned()),
    ];
    let lines = facts.iter().map(|(name, value)| format!("\n{name}: {value}"));
    env!("CARGO_PKG_VERSION").to_owned() + &lines.collect::<String>()
});

pub(crate) const COMPLETIONS_HELP: &str = "\
Examples:
  source <(tonic-rdma completions bash)
  tonic-rdma completions bash > ~/.local/share/bash-completion/completions/tonic-rdma
  tonic-rdma completions zsh > ~/.zfunc/_tonic-rdma
  tonic-rdma completions fish > ~/.config/fish/completions/tonic-rdma.fish";

/// The options of `completions`.
#[derive(Debug, Args)]
pub(crate) struct CompletionsOptions {
    /// The shell
    #[arg(value_name = "SHELL")]
    shell: Shell,
}

/// The options of `man`.
#[derive(Debug, Args)]
pub(crate) struct ManOptions {
    /// The folder to write all pages to [default: print the first page]
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

/// Prints the completions of `command` for a shell.
pub(crate) fn complete(options: &CompletionsOptions, command: &Command) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut visible(command), command.get_name(), &mut script);
    // clap_complete 4.6 has two forms of a program's name with a dash in scripts for bash, which don't match.
    let script =
        String::from_utf8_lossy(&script).replace("tonic__subcmd__rdma__subcmd__", "tonic__rdma__subcmd__");
    output::print(&script, None)
}

/// Writes the pages of `command` and of its subcommands, or prints that of `command`.
pub(crate) fn man(options: &ManOptions, command: Command) -> Result<(), Failure> {
    if let Some(folder) = &options.folder {
        let refusal =
            |error| Failure::usage(format!("can't write pages to {}", folder.display())).because(error);
        return clap_mangen::generate_to(command, folder).map_err(refusal);
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command.disable_help_subcommand(true))
        .render(&mut page)
        .context("can't make the page")?;
    output::print(&String::from_utf8_lossy(&page), None)
}

/// Returns the names and options that users see. Scripts of completions would offer hidden ones too.
fn visible(command: &Command) -> Command {
    let arguments = command.get_arguments().filter(|argument| !argument.is_hide_set());
    let subcommands = command.get_subcommands().filter(|subcommand| !subcommand.is_hide_set());
    let copy = Command::new(command.get_name().to_owned()).version(env!("CARGO_PKG_VERSION"));
    let copy = copy.args(arguments).subcommands(subcommands.map(visible));
    command.get_about().map_or(copy.clone(), |about| copy.about(about.clone()))
}
