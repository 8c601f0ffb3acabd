use super::Launch;
use crate::error::CollectiveError;

fn of(variables: &[(&str, &str)]) -> Result<Launch, CollectiveError> {
    Launch::from_variables(|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
    })
}

fn port(launch: &Launch) -> u16 {
    launch.address().rsplit_once(':').unwrap().1.parse().unwrap()
}

const TORCHRUN: &[(&str, &str)] = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "node1.example"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "train"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
];

/// What `mpirun -n 2` of Open MPI 4.1.4 sets.
const OPEN_MPI: &[(&str, &str)] = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("OMPI_MCA_ess_base_jobid", "1364852737"),
    ("PMIX_NAMESPACE", "1364852737"),
    ("OMPI_MCA_orte_hnp_uri", "1364852736.0;tcp://192.0.2.2,10.0.0.1:55597;tcp6://[fd00::2]:46003"),
];

const SLURM: &[(&str, &str)] = &[
    ("SLURM_PROCID", "3"),
    ("SLURM_NTASKS", "16"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_JOB_NUM_NODES", "4"),
    ("SLURM_JOB_NODELIST", "rack[01-04,7]n[1-2],login"),
    ("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"),
];

fn with<'a>(base: &[(&'a str, &'a str)], changed: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    changed.iter().chain(base).copied().collect()
}

fn without<'a>(base: &[(&'a str, &'a str)], name: &str) -> Vec<(&'a str, &'a str)> {
    base.iter().copied().filter(|(known, _)| *known != name).collect()
}

#[test]
fn torchrun_tells_rank_size_and_host() {
    let launch = of(TORCHRUN).unwrap();
    assert_eq!((launch.rank(), launch.size()), (5, 8));
    assert!(launch.address().starts_with("node1.example:"), "{launch:?}");
    let other_rank = of(&with(TORCHRUN, &[("RANK", "0"), ("LOCAL_RANK", "0")])).unwrap();
    assert_eq!((launch.address(), launch.job_name()), (other_rank.address(), other_rank.job_name()));
    let restarted = of(&with(TORCHRUN, &[("TORCHELASTIC_RESTART_COUNT", "1")])).unwrap();
    assert_ne!(launch.address(), restarted.address());
    let one_host = of(&with(TORCHRUN, &[("LOCAL_WORLD_SIZE", "8")])).unwrap();
    assert!(one_host.address().starts_with("127.0.0.1:"), "{one_host:?}");
}

#[test]
fn the_port_is_never_that_of_torchruns_agent() {
    for master in 20_000..32_000 {
        let master = master.to_string();
        let launch = of(&with(TORCHRUN, &[("MASTER_PORT", &master)])).unwrap();
        assert_ne!(port(&launch).to_string(), master);
    }
}

#[test]
fn open_mpi_tells_rank_size_and_host() {
    let launch = of(OPEN_MPI).unwrap();
    assert_eq!((launch.rank(), launch.size()), (1, 2));
    assert!(launch.address().starts_with("127.0.0.1:"), "{launch:?}");
    let hosts = of(&with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")])).unwrap();
    assert!(hosts.address().starts_with("192.0.2.2:"), "{hosts:?}");
    let other_job = of(&with(OPEN_MPI, &[("PMIX_NAMESPACE", "1364852738")])).unwrap();
    assert_ne!(launch.address(), other_job.address());
}

#[test]
fn slurm_tells_rank_size_and_the_first_host() {
    let launch = of(SLURM).unwrap();
    assert_eq!((launch.rank(), launch.size()), (3, 16));
    assert!(launch.address().starts_with("rack01n1:"), "{launch:?}");
    let one_node = of(&with(SLURM, &[("SLURM_JOB_NUM_NODES", "1")])).unwrap();
    assert!(one_node.address().starts_with("127.0.0.1:"), "{one_node:?}");
    let no_list = of(&without(SLURM, "SLURM_JOB_NODELIST")).unwrap();
    assert!(no_list.address().starts_with("10.0.0.9:"), "{no_list:?}");
    let other_step = of(&with(SLURM, &[("SLURM_STEP_ID", "1")])).unwrap();
    assert_ne!(launch.address(), other_step.address());
}

/// In a batch script Slurm sets the variables of a task, and starts no other tasks.
#[test]
fn a_batch_script_of_slurm_is_no_rank_unless_it_is_the_only_one() {
    let batch = without(SLURM, "SLURM_STEP_ID");
    let said = of(&with(&batch, &[("SLURM_PROCID", "0")])).unwrap_err().to_string();
    assert!(said.contains("srun") && said.contains("RDMA_COLLECTIVE_RANK"), "{said}");
    let alone = of(&with(&batch, &[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")])).unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    // Older releases have this name.
    let older = of(&with(&batch, &[("SLURM_STEPID", "0")])).unwrap();
    assert_eq!(older.address(), of(SLURM).unwrap().address());
    // Who starts the ranks in the script numbers them.
    let numbered = of(&with(&batch, &[("RDMA_COLLECTIVE_RANK", "2")])).unwrap();
    assert_eq!((numbered.rank(), numbered.size()), (2, 16));
}

#[test]
fn torchrun_and_open_mpi_within_slurm_count_more_than_slurm() {
    assert_eq!(of(&with(SLURM, OPEN_MPI)).unwrap(), of(OPEN_MPI).unwrap());
    assert_eq!(of(&with(OPEN_MPI, TORCHRUN)).unwrap(), of(TORCHRUN).unwrap());
}

/// What Hydra sets in process 2 of `mpirun -n 4` of MPICH or Intel MPI.
const HYDRA: &[(&str, &str)] = &[
    ("PMI_RANK", "2"),
    ("PMI_SIZE", "4"),
    ("MPI_LOCALRANKID", "2"),
    ("MPI_LOCALNRANKS", "4"),
    ("PMI_FD", "9"),
];

/// What the script of a job with one task has, and what srun sets in its two tasks, one on each of two nodes.
const BATCH: &[(&str, &str)] = &[
    ("SLURM_PROCID", "0"),
    ("SLURM_NTASKS", "1"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_JOB_NUM_NODES", "1"),
    ("SLURM_JOB_NODELIST", "n1"),
];
const TWO_TASKS: &[(&str, &str)] = &[
    ("SLURM_PROCID", "1"),
    ("SLURM_NTASKS", "2"),
    ("SLURM_JOB_ID", "4711"),
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEP_NUM_TASKS", "2"),
    ("SLURM_STEP_NUM_NODES", "2"),
    ("SLURM_STEP_NODELIST", "n[1-2]"),
];

#[test]
fn hydra_tells_rank_and_size_also_within_slurm() {
    let alone = of(HYDRA).unwrap();
    assert_eq!((alone.rank(), alone.size()), (2, 4));
    assert!(alone.address().starts_with("127.0.0.1:"), "{alone:?}");
    // In a batch script Hydra forks, or starts a proxy by srun, which is the task.
    let proxy = [("SLURM_STEP_ID", "0"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_STEP_NUM_NODES", "1")];
    let several = [("SLURM_NTASKS", "16")];
    for slurm in [BATCH.to_vec(), with(BATCH, &proxy), with(BATCH, &several), without(BATCH, "SLURM_NTASKS")]
    {
        let within = of(&with(&slurm, HYDRA)).unwrap();
        assert_eq!((within.rank(), within.size()), (2, 4), "{slurm:?}");
        assert_ne!(within.address(), alone.address(), "another job");
        let other = of(&with(&with(&slurm, HYDRA), &[("PMI_RANK", "0"), ("MPI_LOCALRANKID", "0")])).unwrap();
        assert_eq!((other.address(), other.job_name()), (within.address(), within.job_name()));
    }
    // Two proxies, each with two processes: no variable tells where rank 0 is.
    let hosts = with(TWO_TASKS, &with(HYDRA, &[("MPI_LOCALNRANKS", "2"), ("MPI_LOCALRANKID", "0")]));
    let said = of(&hosts).unwrap_err().to_string();
    assert!(said.contains("MPICH") && said.contains("Set RDMA_COLLECTIVE_ADDRESS"), "{said}");
    let told = of(&with(&hosts, &[("RDMA_COLLECTIVE_ADDRESS", "n1:29000")])).unwrap();
    assert_eq!((told.rank(), told.size(), told.address()), (2, 4, "n1:29000"));
}

/// `srun --mpi=pmi2` sets the variables of both alike.
#[test]
fn slurm_tells_the_host_where_hydras_variables_agree() {
    let pmi2 = [("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("PMI_FD", "9"), ("PMI_JOBID", "4711.0")];
    assert_eq!(of(&with(TWO_TASKS, &pmi2)).unwrap(), of(TWO_TASKS).unwrap());
}

/// Each of the processes that one launcher started runs another launcher. The numbers of the second are
/// right, those of the first are inherited, and nothing tells them apart.
#[test]
fn launchers_that_contradict_each_other_are_an_error_that_names_both() {
    let srun = [("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_STEP_NUM_NODES", "1")];
    let srun = with(TWO_TASKS, &srun);
    let single_open_mpi = with(
        OPEN_MPI,
        &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "1")],
    );
    let single_hydra = with(HYDRA, &[("PMI_RANK", "0"), ("PMI_SIZE", "1"), ("MPI_LOCALNRANKS", "1")]);
    let single_torchrun = with(TORCHRUN, &[("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")]);
    let cases = [
        (with(&srun, &single_open_mpi), "Open MPI says rank 0 of 1", "Slurm says rank 2 of 4"),
        (with(&srun, &single_hydra), "MPI) says rank 0 of 1", "Slurm says rank 2 of 4"),
        (with(HYDRA, &single_torchrun), "torchrun says rank 0 of 1", "MPI) says rank 2 of 4"),
        (with(OPEN_MPI, &single_torchrun), "torchrun says rank 0 of 1", "Open MPI says rank 1 of 2"),
        (with(HYDRA, &single_open_mpi), "Open MPI says rank 0 of 1", "MPI) says rank 2 of 4"),
        (
            with(HYDRA, &with(TORCHRUN, &[("LOCAL_WORLD_SIZE", "8")])),
            "torchrun says rank 5 of 8",
            "MPI) says rank 2 of 4",
        ),
        (with(BATCH, &without(HYDRA, "PMI_SIZE")), "Slurm says rank 0 of 1", "PMI_RANK is 2"),
        (with(BATCH, &[("MV2_COMM_WORLD_RANK", "3")]), "Slurm says rank 0 of 1", "MV2_COMM_WORLD_RANK is 3"),
    ];
    for (variables, first, second) in cases {
        let said = of(&variables).unwrap_err().to_string();
        assert!([first, second, "RDMA_COLLECTIVE_RANK"].iter().all(|part| said.contains(part)), "{said}");
        let numbered = of(&with(&variables, &[("RDMA_COLLECTIVE_RANK", "0")])).unwrap();
        assert_eq!(numbered.rank(), 0);
    }
    // One agent of torchrun for each process of another launcher, or only one of them.
    for outer in
        [with(TWO_TASKS, &[]), with(OPEN_MPI, &[]), with(HYDRA, &[("PMI_RANK", "0"), ("PMI_SIZE", "1")])]
    {
        assert_eq!(of(&with(&outer, TORCHRUN)).unwrap(), of(TORCHRUN).unwrap());
    }
}

/// `srun -n 4 --pty bash` starts one shell, which is task 0 of 4 for Slurm, and the user starts ranks there.
#[test]
fn an_interactive_shell_of_slurm_is_no_rank_of_the_launchers_in_it() {
    let shell = [("SLURM_PROCID", "0"), ("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PTY_PORT", "34889")];
    let shell = with(TWO_TASKS, &shell);
    for rank in ["0", "1", "2", "3"] {
        let torchrun = [("RANK", rank), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4")];
        let open_mpi = [
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "4"),
        ];
        for inner in
            [with(TORCHRUN, &torchrun), with(OPEN_MPI, &open_mpi), with(HYDRA, &[("PMI_RANK", rank)])]
        {
            let launch = of(&with(&shell, &inner)).unwrap();
            assert_eq!((launch.rank().to_string().as_str(), launch.size()), (rank, 4), "{inner:?}");
            assert!(launch.address().starts_with("127.0.0.1:"), "{launch:?}");
        }
    }
    // A step that is started in the shell inherits its variables. Its tasks are several.
    let single = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
    let step = with(&shell, &[("SLURM_PROCID", "2"), ("SLURM_STEP_NUM_NODES", "1")]);
    let said = of(&with(&step, &with(OPEN_MPI, &single))).unwrap_err().to_string();
    assert!(said.contains("Slurm says rank 2 of 4"), "{said}");
}

/// mpirun starts one daemon by srun on each host of the job, also on hosts that get no rank.
#[test]
fn mpirun_may_start_fewer_ranks_than_daemons() {
    let daemon = [("SLURM_STEP_NUM_TASKS", "3"), ("SLURM_STEP_NUM_NODES", "3")];
    let daemon = with(TWO_TASKS, &daemon);
    let open_mpi = with(OPEN_MPI, &[("OMPI_COMM_WORLD_LOCAL_SIZE", "1")]);
    assert_eq!(of(&with(&daemon, &open_mpi)).unwrap(), of(&open_mpi).unwrap());
    let hydra = with(HYDRA, &[("PMI_RANK", "1"), ("PMI_SIZE", "2"), ("MPI_LOCALNRANKS", "1")]);
    let hydra = with(&hydra, &[("RDMA_COLLECTIVE_ADDRESS", "n1:29000")]);
    assert_eq!(of(&with(&daemon, &hydra)).unwrap().size(), 2);
    // All ranks may run on one host: then Open MPI tells that a daemon has started them, and not mpirun
    // itself.
    let all_here = with(&daemon, OPEN_MPI);
    let said = of(&all_here).unwrap_err().to_string();
    assert!(said.contains("Open MPI says rank 1 of 2, and Slurm says rank 1 of 3"), "{said}");
    let uri = "OMPI_MCA_orte_local_daemon_uri";
    let started = with(&all_here, &[(uri, "1364852736.1;tcp://192.0.2.3:55597")]);
    assert_eq!(of(&started).unwrap(), of(OPEN_MPI).unwrap());
    let own = "1364852736.0;tcp://192.0.2.2,10.0.0.1:55597;tcp6://[fd00::2]:46003";
    of(&with(&all_here, &[(uri, own)])).unwrap_err();
}

/// `srun -n 4 torchrun --standalone`: independent groups, as their user has said.
#[test]
fn a_standalone_torchrun_is_a_group_of_its_own() {
    let alone = [
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_WORLD_SIZE", "1"),
        ("TORCHELASTIC_RUN_ID", "6b0b9f1c-3f0e-4c89-9d5a-0f6d8e4d7a11"),
    ];
    let alone = with(TORCHRUN, &alone);
    for outer in [with(TWO_TASKS, &[("SLURM_STEP_NUM_NODES", "1")]), with(OPEN_MPI, &[]), with(HYDRA, &[])] {
        let launch = of(&with(&outer, &alone)).unwrap();
        assert_eq!((launch.rank(), launch.size()), (0, 1));
        // Without --standalone the run has the name "none", or one of the user's.
        for name in ["none", "train", "6b0b9f1c-3f0e-4c89-9d5a-0f6d8e4d7a1g"] {
            of(&with(&outer, &with(&alone, &[("TORCHELASTIC_RUN_ID", name)]))).unwrap_err();
        }
        // One agent of several, so the agents form a group.
        of(&with(&outer, &with(&alone, &[("WORLD_SIZE", "3")]))).unwrap_err();
    }
}

/// In the shell of salloc Slurm may set the variables of a step with a number of its own.
#[test]
fn the_shell_of_salloc_is_no_task() {
    let shell = [("SLURM_STEP_ID", "4294967290"), ("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")];
    let said = of(&with(SLURM, &shell)).unwrap_err().to_string();
    assert!(said.contains("srun"), "{said}");
}

#[test]
fn the_own_variables_override_any_launcher() {
    let own = [
        ("RDMA_COLLECTIVE_RANK", "2"),
        ("RDMA_COLLECTIVE_SIZE", "3"),
        ("RDMA_COLLECTIVE_ADDRESS", "host:1234"),
    ];
    assert_eq!(of(&own).unwrap(), Launch::new(2, 3, "host:1234"));
    assert_eq!(of(&with(TORCHRUN, &own)).unwrap(), Launch::new(2, 3, "host:1234"));
    let address = of(&with(OPEN_MPI, &own[2..])).unwrap();
    assert_eq!((address.rank(), address.size(), address.address()), (1, 2, "host:1234"));
    let alone = of(&[("RDMA_COLLECTIVE_RANK", "0"), ("RDMA_COLLECTIVE_SIZE", "1")]).unwrap();
    assert_eq!(alone.size(), 1);
}

#[test]
fn a_rank_may_name_its_host() {
    assert_eq!(of(TORCHRUN).unwrap().host_name(), None);
    let launch = of(&with(TORCHRUN, &[("RDMA_COLLECTIVE_HOST", "rack 7")])).unwrap();
    assert_eq!(launch.host_name(), Some("rack 7"));
    // A launch that a program made.
    let lookup = |name: &str| (name == "RDMA_COLLECTIVE_HOST").then(|| "rack 8".into());
    let own = || Launch::new(0, 1, "127.0.0.1:0");
    let hosts = [own(), own().host("rack 9")].map(|launch| launch.with_host_from(lookup).unwrap());
    assert_eq!(hosts.each_ref().map(Launch::host_name), [Some("rack 8"), Some("rack 9")]);
    let long = "x".repeat(257);
    for name in ["", &long] {
        let error = of(&with(TORCHRUN, &[("RDMA_COLLECTIVE_HOST", name)])).unwrap_err().to_string();
        assert_eq!(error, format!("RDMA_COLLECTIVE_HOST={name:?}: takes a name of 1 to 256 bytes"));
        let error = Launch::new(0, 1, "127.0.0.1:0").host(name).checked().unwrap_err().to_string();
        let length = name.len();
        assert_eq!(error, format!("the host's name has {length} bytes; it takes from 1 to 256"));
    }
}

#[test]
fn errors_name_the_variable_and_its_value() {
    let message = |variables: &[(&str, &str)]| of(variables).unwrap_err().to_string();
    assert_eq!(
        message(&[]),
        "no launcher started this process: start it with torchrun, mpirun or srun, or set RDMA_COLLECTIVE_RANK, \
         RDMA_COLLECTIVE_SIZE and RDMA_COLLECTIVE_ADDRESS"
    );
    assert_eq!(
        message(&[("RDMA_COLLECTIVE_RANK", "1")]),
        "no launcher started this process, and RDMA_COLLECTIVE_SIZE and RDMA_COLLECTIVE_ADDRESS are not set"
    );
    assert_eq!(message(&with(TORCHRUN, &[("RANK", "-1")])), "RANK=\"-1\": takes a number");
    assert_eq!(message(&with(TORCHRUN, &[("RANK", "8")])), "rank 8 of 8: ranks are from 0 to 7");
    assert_eq!(
        message(&with(TORCHRUN, &[("MASTER_PORT", "70000")])),
        "MASTER_PORT=\"70000\": takes a number from 1 to 65535"
    );
    assert_eq!(
        message(&without(TORCHRUN, "MASTER_ADDR")),
        "torchrun does not tell where rank 0 runs: MASTER_ADDR is not set. Set RDMA_COLLECTIVE_ADDRESS to host:port of rank 0"
    );
    assert_eq!(
        message(&without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE")),
        "the launcher did not set OMPI_COMM_WORLD_SIZE"
    );
    let uri = [("OMPI_COMM_WORLD_LOCAL_SIZE", "1"), ("OMPI_MCA_orte_hnp_uri", "file:x")];
    assert_eq!(
        message(&with(OPEN_MPI, &uri)),
        "OMPI_MCA_orte_hnp_uri=\"file:x\": takes NUMBER;tcp://HOST:PORT"
    );
    assert_eq!(message(&[("SLURM_PROCID", "0")]), "SLURM_PROCID is set, and SLURM_NTASKS is not");
    for address in ["host", ":80", "host:0", "host:x"] {
        assert_eq!(
            message(&[("RDMA_COLLECTIVE_ADDRESS", address)]),
            format!("RDMA_COLLECTIVE_ADDRESS={address:?}: takes host:port")
        );
    }
    assert_eq!(
        message(&with(SLURM, &[("SLURM_NTASKS", "5000")])),
        "a group of 5000 ranks; it takes from 1 to 4096"
    );
}
