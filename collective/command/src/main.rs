//! The `tonic-rdma-allreduce` command. It measures and checks allreduce of `tonic-rdma-collective`.
#![forbid(unsafe_code)]

mod launch;
mod options;
mod rank;
mod report;

use std::process::ExitCode;

use tonic_rdma_commands::Failure;

use options::Options;

fn main() -> ExitCode {
    tonic_rdma_commands::main(run)
}

fn run(options: &Options) -> Result<(), Failure> {
    if let Some(spec) = &options.child {
        return rank::work_as_child(options, spec);
    }
    let is_rank = options.ranks.is_none() && rank::is_launched();
    if !is_rank {
        options.check_files()?;
    }
    if is_rank && options.hosts.is_some() {
        return Err(Failure::usage(
            "--hosts is for ranks that this command starts; RDMA_COLLECTIVE_HOST names the host of a rank of a launcher",
        ));
    }
    match &options.ranks {
        _ if is_rank => match rank::work_as_launched(options)? {
            Some(results) => results.show(options),
            None => Ok(()),
        },
        Some(_) if rank::is_of_mpirun() => Err(Failure::usage(
            "--ranks starts local processes, and mpirun has started this one as a rank: leave --ranks or mpirun out",
        )),
        _ => launch::measure_local(options)?.show(options),
    }
}
