// The embedded broker that `fulcrum up` starts: kfake, a broker in one process that speaks Kafka's protocol with
// consumer groups, transactions and fetches that wait for records.
//
// It listens on 127.0.0.1 only. Records are in files under -folder and outlive a killed broker, though not a machine
// that loses power: nothing waits for the disk. There is one copy of each.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strconv"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

const (
	// A topic whose records are kept for no longer holds telemetry, of which a person's own machine keeps little.
	telemetryKept = 24 * time.Hour
	// Of each of its partitions: half an hour of eight busy workers.
	telemetryBytes = 32 << 20
	segmentBytes   = 4 << 20
	// Of each partition of any other topic, so that no disk is filled by what nobody deletes.
	partitionBytes = 4 << 30
	// How often records that are kept for long enough are deleted.
	cleaningInterval = 10 * time.Second
)

func main() {
	port := flag.Int("port", 0, "port on 127.0.0.1; 0 picks one")
	folder := flag.String("folder", "", "where records are kept; made when missing (required)")
	flag.Parse()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	cluster, err := start(*port, *folder)
	if err != nil {
		message := fmt.Sprintf("the embedded broker cannot start: %v", err)
		emit(map[string]string{"event": "failed", "error": message})
		fmt.Fprintf(os.Stderr, "fulcrum kafka: %s\n", message)
		os.Exit(2)
	}
	emit(map[string]string{"event": "ready", "kafka": cluster.ListenAddrs()[0]})
	<-stop
	cluster.Close()
}

func start(port int, folder string) (*kfake.Cluster, error) {
	if folder == "" {
		return nil, fmt.Errorf("-folder is missing")
	}
	// What is in it are prompts and answers.
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, err
	}
	cluster, err := kfake.NewCluster(
		kfake.NumBrokers(1),
		kfake.Ports(port),
		kfake.DataDir(folder),
		kfake.DefaultNumPartitions(1),
		kfake.BrokerConfigs(map[string]string{
			"log.cleaner.backoff.ms": strconv.FormatInt(cleaningInterval.Milliseconds(), 10),
			"log.retention.bytes":    strconv.FormatInt(partitionBytes, 10),
		}),
	)
	if err != nil {
		return nil, err
	}
	cluster.ControlKey(int16(kmsg.CreateTopics), func(request kmsg.Request) (kmsg.Response, error, bool) {
		boundTelemetry(request.(*kmsg.CreateTopicsRequest))
		return nil, nil, false
	})
	return cluster, nil
}

// boundTelemetry adds a bound in bytes to topics whose records are kept for a short time.
func boundTelemetry(request *kmsg.CreateTopicsRequest) {
	for i := range request.Topics {
		topic := &request.Topics[i]
		if !keptForAtMost(topic, telemetryKept) {
			continue
		}
		set(topic, "retention.bytes", telemetryBytes)
		set(topic, "segment.bytes", segmentBytes)
	}
}

func keptForAtMost(topic *kmsg.CreateTopicsRequestTopic, most time.Duration) bool {
	for _, config := range topic.Configs {
		if config.Name == "retention.ms" && config.Value != nil {
			kept, err := strconv.ParseInt(*config.Value, 10, 64)
			return err == nil && kept >= 0 && kept <= most.Milliseconds()
		}
	}
	return false
}

func set(topic *kmsg.CreateTopicsRequestTopic, name string, number int64) {
	value := strconv.FormatInt(number, 10)
	for i := range topic.Configs {
		if topic.Configs[i].Name == name {
			topic.Configs[i].Value = &value
			return
		}
	}
	config := kmsg.NewCreateTopicsRequestTopicConfig()
	config.Name, config.Value = name, &value
	topic.Configs = append(topic.Configs, config)
}

// emit writes one status line for the launcher, which may have gone.
func emit(line map[string]string) {
	_ = json.NewEncoder(os.Stdout).Encode(line)
}
