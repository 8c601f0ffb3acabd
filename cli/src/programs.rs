//! The programs with more dependencies than this one, as subcommands where they are installed:
//! `tonic-rdma allreduce` becomes `tonic-rdma-allreduce`, as git and cargo do it.

use std::env;
use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use clap::Args;
use rustix::fs::{Access, access};
use tonic_rdma_commands::Failure;

/// The names of the subcommands. The programs have this name after `tonic-rdma-`, as their packages have.
pub(crate) const NAMES: [&str; 3] = ["allreduce", "graph", "training"];

/// The arguments of a program, which parses them itself.
#[derive(Debug, Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Arguments {
    /// Options of the program, which its --help lists
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
    arguments: Vec<OsString>,
}

/// Returns the path of the program of a subcommand: beside this program, or else in a folder of `PATH`.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    let beside = env::current_exe().ok().and_then(|own| Some(own.parent()?.to_owned()));
    let path = env::var_os("PATH").unwrap_or_default();
    // An empty folder would be the working directory.
    let on_path = env::split_paths(&path).filter(|folder| !folder.as_os_str().is_empty());
    let folders = beside.into_iter().chain(on_path);
    let mut programs = folders.map(|folder| folder.join(format!("tonic-rdma-{name}")));
    programs.find(|program| program.is_file() && access(program, Access::EXEC_OK).is_ok())
}

/// Becomes the program of a subcommand, so that signals reach it and its exit status is that of this process.
/// Returns if that fails.
pub(crate) fn run(name: &str, arguments: &Arguments) -> Result<(), Failure> {
    let Some(program) = find(name) else {
        let source = concat!("--git ", env!("CARGO_PKG_REPOSITORY"));
        return Err(Failure::usage(format!(
            "tonic-rdma-{name} is neither beside this program nor on PATH: install it with `cargo install --locked {source} \
             tonic-rdma-{name}`"
        )));
    };
    let error = Command::new(&program).args(&arguments.arguments).exec();
    Err(Failure::run(format!("can't start {}", program.display())).because(error))
}
