import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.OutputStream;
import java.io.PrintStream;
import java.lang.reflect.InvocationTargetException;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CopyOnWriteArrayList;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.utils.Exit;
import org.slf4j.LoggerFactory;

/**
 * Runs Apache Kafka's command line tools one after the other in this process, since a process for each would take
 * longer to start than to run. A line of JSON on standard input names a class and its arguments; a line on standard
 * output gives its exit code (null: it took too long) and what it wrote. Run from its source: java ToolDriver.java.
 */
public class ToolDriver {
    /** Ends a tool where it asked for the process to end. An Error, so that tools do not catch it as a failure of theirs. */
    private static final class Ended extends Error {
        Ended() {
            super("the tool asked to exit", null, false, false);
        }
    }

    /** One run. A tool that exits waits until its output was taken: what it writes while it unwinds is dropped. */
    private static final class Run {
        final ByteArrayOutputStream out = new ByteArrayOutputStream();
        final ByteArrayOutputStream err = new ByteArrayOutputStream();
        final List<Runnable> hooks = new CopyOnWriteArrayList<>();
        final CountDownLatch over = new CountDownLatch(1);
        final CountDownLatch taken = new CountDownLatch(1);
        private Integer code;

        synchronized void end(int status) {
            if (code == null) code = status;
            over.countDown();
        }

        /** `exited`: the whole process ends, so its exit code is this run's. */
        synchronized String answer(boolean exited) {
            System.out.flush();
            System.err.flush();
            OUT.to = OutputStream.nullOutputStream();
            ERR.to = OutputStream.nullOutputStream();
            Map<String, Object> fields = new HashMap<>();
            fields.put("code", code);
            fields.put("exited", exited);
            fields.put("out", out.toString(StandardCharsets.UTF_8));
            fields.put("err", err.toString(StandardCharsets.UTF_8));
            return JSON.valueToTree(fields).toString();
        }
    }

    /** Standard output or error, for good: Scala's Console keeps the stream that it saw first. */
    private static final class Switch extends OutputStream {
        volatile OutputStream to = OutputStream.nullOutputStream();

        @Override
        public void write(int single) throws IOException {
            to.write(single);
        }

        @Override
        public void write(byte[] bytes, int start, int count) throws IOException {
            to.write(bytes, start, count);
        }

        @Override
        public void flush() throws IOException {
            to.flush();
        }
    }

    private static final Switch OUT = new Switch();
    private static final Switch ERR = new Switch();
    private static final ObjectMapper JSON = new ObjectMapper();
    private static volatile Run current;
    private static PrintStream console;

    public static void main(String[] words) throws IOException, InterruptedException {
        LoggerFactory.getLogger(ToolDriver.class); // its output is bound to the standard error of this process, not of a run
        PrintStream answers = System.out;
        console = System.err;
        BufferedReader requests = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        System.setOut(new PrintStream(OUT, false, StandardCharsets.UTF_8));
        System.setErr(new PrintStream(ERR, false, StandardCharsets.UTF_8));
        Exit.Procedure exit = (status, message) -> {
            Run run = current;
            if (message != null) System.err.println(message);
            run.end(status);
            awaitQuietly(run.taken);
            throw new Ended();
        };
        Exit.setExitProcedure(exit);
        Exit.setHaltProcedure(exit);
        Exit.setShutdownHookAdder((name, hook) -> current.hooks.add(hook));
        Runtime.getRuntime().addShutdownHook(new Thread(() -> { // a tool that calls System.exit itself
            Run run = current;
            if (run != null && run.taken.getCount() > 0) answers.println(run.answer(true));
        }));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            carryOut(JSON.readTree(line), answers);
        }
        Runtime.getRuntime().halt(0); // threads that a tool left behind do not keep the process
    }

    private static void carryOut(JsonNode request, PrintStream answers) throws InterruptedException {
        Run run = new Run();
        current = run;
        OUT.to = run.out;
        ERR.to = run.err;
        System.setIn(new ByteArrayInputStream(request.get("stdin").asText().getBytes(StandardCharsets.UTF_8)));
        String[] words = new String[request.get("words").size()];
        for (int i = 0; i < words.length; i++) words[i] = request.get("words").get(i).asText();
        Thread thread = new Thread(() -> call(run, request.get("tool").asText(), words), "tool");
        thread.setDaemon(true);
        thread.start();
        if (!run.over.await(request.get("seconds").asLong(), TimeUnit.SECONDS)) {
            for (StackTraceElement frame : thread.getStackTrace()) console.println("stuck at " + frame);
        }
        for (Runnable hook : run.hooks) {
            Thread closing = new Thread(hook, "hook");
            closing.setDaemon(true);
            closing.start();
            closing.join(5_000);
        }
        String answer = run.answer(false);
        run.taken.countDown();
        thread.join(2_000); // it closes its clients
        answers.println(answer);
        answers.flush();
    }

    private static void awaitQuietly(CountDownLatch latch) {
        try {
            latch.await();
        } catch (InterruptedException ignored) {
            Thread.currentThread().interrupt();
        }
    }

    private static void call(Run run, String tool, String[] words) {
        try {
            Class.forName(tool).getMethod("main", String[].class).invoke(null, (Object) words);
            run.end(0);
        } catch (InvocationTargetException failure) {
            if (failure.getCause() instanceof Ended) return;
            System.err.print("Exception in thread \"main\" ");
            failure.getCause().printStackTrace();
            run.end(1);
        } catch (ReflectiveOperationException failure) {
            failure.printStackTrace();
            run.end(127);
        }
    }
}
