//! One channel over several endpoints.

use std::collections::HashMap;

use tonic::Code;
use tonic_rdma::{CallConfig, EndpointState, RdmaChannel};
use tonic_rdma_proto::greeter::greeter_client::GreeterClient;

use crate::servers::{Kind, Running, everywhere};
use support::{Child, Port, Runtime, ScriptedGreeter, config, say, until};

fn is_up(channel: &RdmaChannel, index: usize) -> bool {
    matches!(channel.endpoints()[index].state, EndpointState::Up(_))
}

async fn all_up(channel: &RdmaChannel) {
    until(|| (0..channel.endpoints().len()).all(|index| is_up(channel, index))).await;
}

fn balance(servers: &[Running]) -> RdmaChannel {
    RdmaChannel::balance(servers.iter().map(Running::endpoint)).config(config()).connect_lazy()
}

#[test]
fn calls_spread_over_servers_of_all_kinds() {
    for runtime in Runtime::ALL {
        runtime.run(async {
            let (mut servers, mut greeters) = (Vec::new(), Vec::new());
            for kind in Kind::ALL {
                let greeter = ScriptedGreeter::new();
                servers.push(kind.serve(&greeter).await);
                greeters.push(greeter);
            }
            let channel = balance(&servers);
            all_up(&channel).await;
            let mut client = GreeterClient::new(channel.clone());
            for _ in 0..300 {
                assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
            }
            for greeter in &greeters {
                assert!(greeter.calls() >= 40, "{} of 300 calls", greeter.calls());
            }
        });
    }
}

#[test]
fn a_call_goes_to_the_endpoint_with_fewer_calls() {
    everywhere(async |kind| {
        let greeters = [ScriptedGreeter::new(), ScriptedGreeter::new()];
        let servers = [kind.serve(&greeters[0]).await, kind.serve(&greeters[1]).await];
        let channel = balance(&servers);
        all_up(&channel).await;
        let mut calls = tokio::task::JoinSet::new();
        for held in 1..=10 {
            let mut client = GreeterClient::new(channel.clone());
            calls.spawn(async move { say(&mut client, "hold").await });
            until(|| greeters.iter().map(ScriptedGreeter::held).sum::<usize>() == held).await;
        }
        assert_eq!(greeters.each_ref().map(ScriptedGreeter::held), [5, 5]);
        assert_eq!(channel.endpoints().iter().map(|endpoint| endpoint.calls).sum::<usize>(), 10);
        greeters.iter().for_each(|greeter| greeter.release(5));
        for reply in calls.join_all().await {
            assert_eq!(reply.unwrap(), "held");
        }
    });
}

#[test]
fn endpoints_that_are_down_get_no_calls_and_the_last_failure_is_named() {
    Runtime::MultiThread.run(async {
        let dead = [Port::reserve(), Port::reserve()];
        let channel = RdmaChannel::balance(dead.each_ref().map(Port::endpoint)).connect_lazy();
        let status = say(&mut GreeterClient::new(channel.clone()), "hello").await.unwrap_err();
        assert_eq!(status.code(), Code::Unavailable);
        assert!(status.message().contains("all 2 endpoints are down"), "{status}");
        let error = RdmaChannel::balance(dead.each_ref().map(Port::endpoint)).connect().await.unwrap_err();
        assert!(error.to_string().contains("all 2 endpoints are down"), "{error}");
        // One comes up: no call is needed to find it.
        let (greeter, address) = (ScriptedGreeter::new(), dead[0].address.to_string());
        let _running = Kind::Native.serve_at(&address, &greeter, CallConfig::default()).await;
        until(|| is_up(&channel, 0)).await;
        let mut client = GreeterClient::new(channel.clone());
        for _ in 0..50 {
            assert_eq!(say(&mut client, "hello").await.unwrap(), "hello");
        }
        assert_eq!(greeter.calls(), 50);
    });
}

#[test]
fn a_killed_server_fails_few_calls_and_comes_back() {
    for kind in [Kind::Native, Kind::Http2] {
        Runtime::MultiThread.run(async {
            let (port, alive) = (Port::reserve(), kind.serve(&ScriptedGreeter::new()).await);
            let role = format!("serve {kind:?} {}", port.address);
            let start = || {
                let role = role.clone();
                async { tokio::task::spawn_blocking(move || Child::start(&[], &role)).await.unwrap() }
            };
            let doomed = start().await;
            let endpoints = [alive.endpoint(), port.endpoint()];
            let channel = RdmaChannel::balance(endpoints).config(config()).connect_lazy();
            all_up(&channel).await;
            let mut client = GreeterClient::new(channel.clone());
            let mut failed = 0;
            tokio::task::spawn_blocking(move || drop(doomed)).await.unwrap();
            until(|| !is_up(&channel, 1)).await;
            for _ in 0..100 {
                failed += usize::from(say(&mut client, "hello").await.is_err());
            }
            assert_eq!(failed, 0, "calls after the death was seen");
            let _back = start().await;
            until(|| is_up(&channel, 1)).await;
            let mut processes: HashMap<String, usize> = HashMap::new();
            for _ in 0..100 {
                *processes.entry(say(&mut client, "process").await.unwrap()).or_default() += 1;
            }
            assert_eq!(processes.len(), 2, "{processes:?}");
        });
    }
}
